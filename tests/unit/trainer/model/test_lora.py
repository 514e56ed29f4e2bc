"""Low-rank adapters: the formula, the first weights, what is frozen, dropout, the numbers of weights and operations, merging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from common.errors import CheckpointError, ConfigError
from trainer.config import LoraConfig, LossConfig, ModelConfig
from trainer.config.finetuning import PROJECTIONS
from trainer.model.attention import Layout, make_layout
from trainer.model.decoder import Decoder, build_model, flops_per_token, num_weights
from trainer.model.dropout import row_keys
from trainer.model.forward import LossModule
from trainer.model.linear import Linear
from trainer.model.lora import LoraLinear, adapter_names, add_adapters, merged_weights, num_adapter_weights
from trainer.model.parameters import parameters_by_name

CONFIG = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, context=24, vocab_multiple=1)
LORA = LoraConfig(rank=3, alpha=5)
VOCAB = 50


def adapted(lora: LoraConfig = LORA, config: ModelConfig = CONFIG, *, moved: bool = True) -> Decoder:
    """Return a model with adapters; with `moved` their B is not zero."""
    model = build_model(config, VOCAB, seed=0)
    add_adapters(model, lora, seed=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in parameters_by_name(model).items():
            if name.endswith("lora_B.weight") and moved:
                weight.normal_(0, 0.1, generator=generator)
    return model


def batch(keys_B: Tensor | None = None, rows: int = 4) -> tuple[Tensor, Layout]:
    tokens_BL = torch.randint(VOCAB, (rows, 24), generator=torch.Generator().manual_seed(2))
    positions_BL = torch.arange(24).expand(rows, 24)
    return tokens_BL, make_layout(torch.zeros(rows, 24, dtype=torch.int32), positions_BL, keys_B=keys_B)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("learns_input", [True, False])
def test_output_and_gradients_are_those_of_the_formula(kind: torch.dtype, *, learns_input: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    module = LoraLinear(Linear(40, 56), LORA, 3).to(kind)
    x = torch.randn(4, 24, 40, generator=generator).to(kind).requires_grad_(learns_input)
    module.weight.requires_grad_(requires_grad=False)
    with torch.no_grad():
        module.lora_B.weight.normal_(generator=generator)
    grad = torch.randn(4, 24, 56, generator=generator).to(kind)
    module(x).backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, module.lora_A.weight, module.lora_B.weight)]
    y = functional.linear(exact[0], module.weight.double() + 5 / 3 * exact[2] @ exact[1])
    y.backward(grad.double())
    with torch.no_grad():
        torch.testing.assert_close(module(x), y.to(kind), rtol=1e-4, atol=1e-4)
    for found, expected in zip((x, module.lora_A.weight, module.lora_B.weight), exact, strict=True):
        if found.requires_grad:
            assert found.grad is not None
            assert expected.grad is not None
            torch.testing.assert_close(found.grad, expected.grad.to(kind), rtol=1e-4, atol=1e-3)
    assert module.weight.grad is None
    assert (x.grad is None) == (not learns_input)


def test_a_new_model_computes_the_bits_of_the_model_without_adapters() -> None:
    plain, model = build_model(CONFIG, VOCAB, seed=0), adapted(moved=False)
    tokens_BL, layout = batch()
    assert torch.equal(plain(tokens_BL, layout), model(tokens_BL, layout))
    with torch.no_grad():
        assert torch.equal(plain(tokens_BL, layout), model(tokens_BL, layout))


def test_first_weights_depend_on_the_seed_alone_and_a_is_within_its_bound() -> None:
    torch.manual_seed(9)
    one = adapted(moved=False)
    torch.manual_seed(10)
    two, other = adapted(moved=False), build_model(CONFIG, VOCAB, seed=0)
    add_adapters(other, LORA, seed=5)
    weights, same, different = (dict(model.named_parameters()) for model in (one, two, other))
    for name in adapter_names(one):
        assert torch.equal(weights[name], same[name])
        assert torch.equal(weights[name], different[name]) == name.endswith("lora_B.weight")
        bound = weights[name].shape[1] ** -0.5
        if name.endswith("lora_A.weight"):
            assert 0.8 * bound < weights[name].abs().max() <= bound
            assert weights[name].std().item() == pytest.approx(bound / 3**0.5, rel=0.25)


def test_all_parameters_but_adapters_and_those_of_a_new_head_are_frozen() -> None:
    model = build_model(CONFIG, VOCAB, seed=0)
    names = set(dict(model.named_parameters()))
    add_adapters(model, LORA, seed=0, trained={"model.norm.weight"})
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == adapter_names(model) | {"model.norm.weight"}
    assert set(dict(model.named_parameters())) - names == adapter_names(model)
    unchanged = build_model(CONFIG, VOCAB, seed=0)
    add_adapters(unchanged, LoraConfig(), seed=0)
    assert not adapter_names(unchanged)
    assert all(weight.requires_grad for weight in unchanged.parameters())


def test_only_the_targets_have_adapters() -> None:
    model = adapted(LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    places = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    assert places == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}
    with pytest.raises(ConfigError, match="the model has no such matrices"):
        add_adapters(nn.Sequential(nn.Linear(3, 3)), LORA, seed=0)


def gradients(model: Decoder, keys_B: Tensor | None = None) -> dict[str, Tensor]:
    tokens_BL, layout = batch(keys_B)
    loss = LossModule(model.train(), LossConfig())
    loss(tokens_BL, layout, tokens_BL.roll(-1, 1)).backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("how", ["selective", "full"])
def test_activation_checkpointing_and_dropout_give_the_same_bits(how: Any) -> None:
    lora, keys_B = LORA.model_copy(update={"dropout": 0.2}), row_keys(1, 2, 0, 4, torch.device("cpu"))
    kept = gradients(adapted(lora), keys_B)
    again = gradients(adapted(lora, CONFIG.model_copy(update={"activation_checkpointing": how})), keys_B)
    assert kept.keys() == adapter_names(adapted(lora))
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    others = gradients(adapted(lora), row_keys(1, 3, 0, 4, torch.device("cpu")))
    assert not any(torch.equal(kept[name], others[name]) for name in kept)


def test_dropout_acts_on_the_input_of_the_adapter_alone_and_differs_between_matrices() -> None:
    seen: list[Tensor] = []
    keys_B = row_keys(0, 0, 0, 4, torch.device("cpu"))
    model = adapted(LORA.model_copy(update={"dropout": 0.25}))
    for name in ("k_proj", "v_proj"):
        module = getattr(model.model.layers[1].self_attn, name)
        module.lora_A.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    plain_BL = batch(keys_B)
    model(*plain_BL)
    shares = [(dropped == 0).double().mean().item() for dropped in seen]
    assert shares == pytest.approx([0.25, 0.25], abs=0.03)
    assert not torch.equal(seen[0] == 0, seen[1] == 0)
    still = model.eval()(*batch())
    assert torch.equal(still, adapted()(*batch()))  # no keys, no dropout


def test_numbers_of_weights_and_operations_are_those_of_the_model() -> None:
    lora = LoraConfig(rank=3, targets=PROJECTIONS[:5])
    model = adapted(lora)
    counted = sum(weight.numel() for weight in model.parameters())
    assert counted == num_weights(CONFIG, VOCAB) + num_adapter_weights(CONFIG, lora)
    assert num_adapter_weights(CONFIG, LoraConfig()) == 0
    tokens_BL, layout = batch()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.double()(tokens_BL, layout).sum().backward()
    # The embedding is frozen, so the input of the first layer needs no gradient, which the formula does not leave out.
    unneeded = 2 * sum(CONFIG.projections[name][0] * (CONFIG.projections[name][1] + 3) for name in PROJECTIONS[:3])
    expected = flops_per_token(CONFIG, VOCAB, 24, lora) - unneeded
    assert counter.get_total_flops() == pytest.approx(expected * 4 * 24, rel=1e-12)
    assert flops_per_token(CONFIG, VOCAB, 24, LoraConfig()) == flops_per_token(CONFIG, VOCAB, 24)


def test_merged_weights_compute_the_same_and_have_the_bits_of_the_ordered_sum() -> None:
    model = adapted()
    weights = {name: weight.detach() for name, weight in parameters_by_name(model).items()}
    merged = merged_weights(weights, LORA)
    plain = build_model(CONFIG, VOCAB, seed=7)
    assert merged.keys() == parameters_by_name(plain).keys()
    plain.load_state_dict({**merged, "lm_head.weight": merged["model.embed_tokens.weight"]})
    with torch.no_grad():
        torch.testing.assert_close(plain(*batch()), model(*batch()), rtol=1e-5, atol=1e-6)
    name = "model.layers.1.mlp.up_proj"
    a, b, w = (weights[name + end].double() for end in (".lora_A.weight", ".lora_B.weight", ".weight"))
    row = [sum(float(b[7, r]) * float(a[r, column]) for r in range(3)) * (5 / 3) + float(w[7, column]) for column in range(32)]
    assert merged[f"{name}.weight"][7].tolist() == torch.tensor(row, dtype=torch.float64).float().tolist()
    assert torch.equal(merged["model.norm.weight"], weights["model.norm.weight"])
    same = merged_weights(merged, LoraConfig())
    assert all(same[key] is merged[key] for key in merged)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 4}, "does not fit its matrix or lora.rank"),
        ({"rank": None}, "lora.rank = none, and the checkpoint has 14 adapters"),
        ({"drop": "lora_A.weight"}, "does not fit"),
        ({"drop": "up_proj.weight"}, "up_proj does not fit"),
        ({"drop": "lora"}, "lora.rank = 3, and the checkpoint has no adapters"),
        ({"flat": "lora_B.weight"}, "does not fit"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(change: dict[str, Any], named: str) -> None:
    weights = {name: weight.detach() for name, weight in parameters_by_name(adapted()).items()}
    if end := change.get("drop"):
        weights = {name: weight for name, weight in weights.items() if not (name.endswith(end) or (end == "lora" and end in name))}
    if end := change.get("flat"):
        weights = {name: weight.flatten() if name.endswith(end) else weight for name, weight in weights.items()}
    with pytest.raises(CheckpointError, match=named):
        merged_weights(weights, LORA.model_copy(update={"rank": change["rank"]}) if "rank" in change else LORA)


def test_the_factor_is_alpha_over_rank_and_two_by_default() -> None:
    assert LoraConfig().factor == 0
    assert LoraConfig(rank=16).factor == 2
    assert LoraConfig(rank=16, alpha=4).factor == 0.25
    with pytest.raises(ValueError, match="names a matrix twice"):
        LoraConfig(rank=2, targets=("q_proj", "q_proj"))
