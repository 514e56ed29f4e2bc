from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from common.settings.dotted import to_toml
from trainer.config import ModelConfig
from trainer.config.model import differing_shape
from trainer.runs.defaults import inherited

BASE = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, context=64, rope_theta=5e5, residual_dropout=0.1, qk_norm=False)


def write_run(run: Path, model: ModelConfig = BASE) -> Path:
    run.mkdir()
    (run / "config.toml").write_text(to_toml("train", {"init": "elsewhere", "model": model.model_dump(mode="json")}))
    return run


def test_the_shape_is_taken_and_what_may_differ_is_not(tmp_path: Path) -> None:
    found = inherited({"init": str(write_run(tmp_path / "base"))})
    model = ModelConfig.model_validate({name.removeprefix("model."): value for name, value in found.items()})
    assert differing_shape(model, BASE) == {}
    assert (model.context, model.rope_theta, model.residual_dropout) == (64, 5e5, 0.0)
    assert "model.residual_dropout" not in found
    assert "model.activation_checkpointing" not in found


@pytest.mark.parametrize(("given", "context"), [("16", 64), (128, 128), ("128", 128), ("long", 64), (None, 64)])
def test_the_context_is_at_least_that_of_the_other_run(given: Any, context: int, tmp_path: Path) -> None:
    base = write_run(tmp_path / "base")
    assert inherited({"init": str(base), "model.context": given})["model.context"] == context


def test_a_base_of_the_rotary_embedding_that_is_given_is_kept(tmp_path: Path) -> None:
    given = {"init": str(write_run(tmp_path / "base")), "model.rope_theta": "1e6"}
    assert "model.rope_theta" not in inherited(given)


def test_without_the_other_run_the_settings_that_this_run_has_recorded_decide(tmp_path: Path) -> None:
    given = {"init": str(tmp_path / "gone"), "run": str(write_run(tmp_path / "run"))}
    assert inherited(given)["model.layers"] == 2
    with pytest.raises(CheckpointError, match=r"init = .*gone: no config.toml, so this is not a run"):
        inherited({"init": str(tmp_path / "gone"), "run": str(tmp_path / "new")})


@pytest.mark.parametrize("content", ["", "[train]", "[train]\nmodel = 7", "[train.model]\nlayers = 0", "\0"])
def test_damaged_settings_of_the_other_run_are_refused(content: str, tmp_path: Path) -> None:
    base = write_run(tmp_path / "base")
    (base / "config.toml").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.toml: the settings (of the model )?cannot be read"):
        inherited({"init": str(base)})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"layers": 3}, ["model.layers"]),
        ({"block": "gpt2", "kv_heads": 4}, ["model.block", "model.kv_heads", "model.context"]),
        ({"head_dim": 8}, []),  # the width of a head that follows from width and heads
        ({"kv_heads": 4, "qk_norm": True}, ["model.kv_heads", "model.qk_norm"]),
        ({"mlp_width": 128}, []),
        ({"mlp_width": 96}, ["model.mlp_width"]),
        ({"vocab_rows": 300, "tie_embeddings": False}, ["model.tie_embeddings", "model.vocab_rows"]),
        ({"base_width": 16, "norm_eps": 1e-5}, ["model.norm_eps", "model.base_width"]),
        ({"context": 8, "rope_theta": 2.0, "init_std": 0.5, "embedding_dropout": 0.1, "activation_checkpointing": "full"}, []),
    ],
)
def test_settings_are_compared_by_the_shapes_that_they_give(changes: dict[str, Any], names: list[str]) -> None:
    assert list(differing_shape(BASE.model_copy(update=changes), BASE)) == names
