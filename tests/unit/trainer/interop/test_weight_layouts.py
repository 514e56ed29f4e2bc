from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, ConfigError
from tests.support.published import GPT2, write_published
from trainer.config import ModelConfig
from trainer.interop.architecture import config_of, read_architecture
from trainer.interop.import_model import import_model
from trainer.interop.weight_layouts import from_gpt2, to_gpt2
from trainer.model.decoder import build_model
from trainer.model.parameters import parameters_by_name
from trainer.model.saved_decoder import open_decoder
from trainer.runs.saved_run import SavedRun

MODEL = ModelConfig(block="gpt2", biases=True, layers=2, width=48, heads=4, context=64, gelu="tanh", norm_eps=1e-5, vocab_rows=317)


def weights_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {name: weight.detach() for name, weight in parameters_by_name(build_model(model, 283, 0)).items()}
    return {name: weight + torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


def test_queries_keys_and_values_are_one_matrix_and_all_matrices_of_layers_are_transposed() -> None:
    weights = weights_of(MODEL)
    there = to_gpt2(weights, MODEL)
    attention = "model.layers.1.self_attn"
    joined = torch.cat([weights[f"{attention}.{name}_proj.weight"] for name in "qkv"]).T
    assert torch.equal(there["transformer.h.1.attn.c_attn.weight"], joined)
    assert there["transformer.h.1.mlp.c_fc.weight"].shape == (48, 192)
    assert torch.equal(there["transformer.wpe.weight"], weights["model.embed_positions.weight"])
    assert "lm_head.weight" not in there
    assert all(weight.is_contiguous() for weight in there.values())


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_are_the_same_there_and_back(*, tied: bool) -> None:
    model = MODEL.model_copy(update={"tie_embeddings": tied})
    weights = weights_of(model)
    found = from_gpt2(to_gpt2(weights, model), model)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_a_model_without_biases_has_biases_of_zero_there() -> None:
    model = MODEL.model_copy(update={"biases": False})
    there = to_gpt2(weights_of(model), model)
    assert there.keys() == to_gpt2(weights_of(MODEL), MODEL).keys()
    assert not there["transformer.ln_f.bias"].any()
    assert not there["transformer.h.0.attn.c_attn.bias"].any()
    assert there["transformer.h.0.attn.c_attn.bias"].shape == (144,)


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_the_settings_are_the_same_there_and_back(gelu: str, tmp_path: Path) -> None:
    model = MODEL.model_copy(update={"gelu": gelu, "mlp_width": 80, "tie_embeddings": False})
    write_published(tmp_path, weights={}, **config_of(model, 283))
    assert read_architecture(tmp_path)[:2] == ("gpt2", model)


def published(tmp_path: Path, **weights: torch.Tensor) -> Path:
    tensors = to_gpt2(weights_of(MODEL), MODEL) | weights
    return write_published(tmp_path / "published", "gpt2", weights=tensors, **GPT2)


def test_published_names_without_a_prefix_and_masks_are_read(tmp_path: Path) -> None:
    tensors = {name.removeprefix("transformer."): weight for name, weight in to_gpt2(weights_of(MODEL), MODEL).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    write_published(tmp_path / "published", "gpt2", weights=tensors, num_files=2)
    import_model(tmp_path / "published", tmp_path / "run")
    found = open_decoder(SavedRun(tmp_path / "run"), "latest").weights
    assert all(torch.equal(found[name], weight) for name, weight in weights_of(MODEL).items())


def test_weights_of_another_shape_and_an_output_that_is_not_tied_are_refused(tmp_path: Path) -> None:
    wrong = {"transformer.wpe.weight": torch.zeros(65, 48)}
    with pytest.raises(ConfigError, match=r"has the shape 65x48, and config\.json describes 64x48"):
        import_model(published(tmp_path, **wrong), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is true, but lm_head\.weight differs from transformer\.wte\.weight"):
        import_model(published(tmp_path, **{"lm_head.weight": torch.zeros(317, 48)}), tmp_path / "run")
