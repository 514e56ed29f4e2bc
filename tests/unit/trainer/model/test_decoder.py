"""B rows, L tokens of a row, D width, N query heads, K key and value heads, H width of a head, V vocabulary."""

from typing import Literal
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.errors import ConfigError
from trainer.config import ModelConfig
from trainer.model.attention import Backend, Layout, document_mask, make_layout
from trainer.model.decoder import Decoder, build_model
from trainer.model.layers import RMSNorm, rotary_table, rotate
from trainer.model.parameters import parameters_by_name

CONFIG = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, context=24, vocab_multiple=1)


def segments(*lengths: int, row: int) -> Tensor:
    """One row with documents of these lengths, then padding; shape (1, row)."""
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([numbers + [-1] * (row - len(numbers))], dtype=torch.int32)


def positions(segments_BL: Tensor) -> Tensor:
    index_BL = torch.arange(segments_BL.shape[1]).expand_as(segments_BL)
    starts_BL = torch.ones_like(segments_BL, dtype=torch.bool)
    starts_BL[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
    return index_BL - torch.where(starts_BL, index_BL, 0).cummax(dim=1).values


def layout(segments_BL: Tensor) -> Layout:
    return make_layout(segments_BL, positions(segments_BL))


@pytest.mark.parametrize("backend", ["documents", "sdpa"])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_changing_one_document_leaves_the_logits_of_the_others_bitwise_unchanged(changed: int, backend: Backend) -> None:
    model = build_model(CONFIG, 50, seed=1)
    segments_BL = segments(7, 9, 5, row=24)
    where = make_layout(segments_BL, positions(segments_BL), backend)
    tokens_BL = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    others_BL = torch.where(segments_BL == changed, (tokens_BL + 1) % 50, tokens_BL)
    before, after = (model(tokens, where) for tokens in (tokens_BL, others_BL))
    assert torch.equal(before[segments_BL != changed], after[segments_BL != changed])
    assert not torch.equal(before[segments_BL == changed], after[segments_BL == changed])


def test_a_document_reads_the_same_wherever_it_stands_in_a_row() -> None:
    model = build_model(CONFIG, 50, seed=1)
    document = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(0))
    alone, after_another = segments(9, row=9), segments(8, 9, row=17)
    logits_alone = model(document[None], layout(alone))
    row = torch.cat((torch.zeros(8, dtype=torch.int64), document))[None]
    torch.testing.assert_close(model(row, layout(after_another))[:, 8:], logits_alone)


def test_logits_depend_on_the_distances_between_positions_and_on_nothing_else_of_them() -> None:
    model = build_model(CONFIG.model_copy(update={"init_std": 0.2}), 50, seed=1)
    tokens_BL = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    segments_BL = segments(24, row=24)
    here, shifted, spread = (
        model(tokens_BL, make_layout(segments_BL, place_BL))
        for place_BL in (positions(segments_BL), positions(segments_BL) + 30, positions(segments_BL) * 2)
    )
    torch.testing.assert_close(shifted, here, atol=1e-3, rtol=1e-3)
    assert (spread - here).abs().max() > 0.05


def test_no_token_sees_a_later_one() -> None:
    model = build_model(CONFIG, 50, seed=1)
    segments_BL = segments(24, row=24)
    tokens_BL = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    later_BL = tokens_BL.clone()
    later_BL[0, 12:] = 3
    before, after = (model(tokens, layout(segments_BL)) for tokens in (tokens_BL, later_BL))
    assert torch.equal(before[:, :12], after[:, :12])


@given(shift=st.integers(0, 500), distance=st.integers(0, 50))
@settings(max_examples=20)
def test_rotation_makes_scores_depend_on_distance_only(shift: int, distance: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)

    def score(query_position: int, key_position: int) -> float:
        at = [rotary_table(torch.tensor([[p]]), 16, 10_000.0) for p in (query_position, key_position)]
        return float((rotate(q, at[0]) * rotate(k, at[1])).sum())

    assert score(shift + distance, shift) == pytest.approx(score(distance, 0), abs=1e-3)


def checkpointing(how: str, config: ModelConfig = CONFIG) -> Decoder:
    return build_model(config.model_copy(update={"activation_checkpointing": how}), 50, seed=1)


@pytest.mark.parametrize("backend", ["documents", "sdpa"])
def test_gradients_agree_bit_for_bit_with_and_without_activation_checkpointing(backend: Backend) -> None:
    gradients = []
    segments_BL = segments(10, 14, row=24)
    for how in ("none", "selective", "full"):
        model = checkpointing(how)
        where = make_layout(segments_BL, positions(segments_BL), backend)
        model(torch.zeros(1, 24, dtype=torch.int64), where).float().logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in parameters_by_name(model).values() if parameter.grad is not None])
        assert len(gradients[-1]) == len(parameters_by_name(model))
    for recomputed in gradients[1:]:
        assert all(torch.equal(plain, other) for plain, other in zip(gradients[0], recomputed, strict=True))


def bytes_kept_for_backward(how: str) -> int:
    """What the allocator holds after a forward pass beyond what it held before."""
    model, segments_BL = checkpointing(how, CONFIG.model_copy(update={"layers": 8, "context": 96})), segments(40, 56, row=96)
    tokens_BL, where = torch.zeros(1, 96, dtype=torch.int64), layout(segments_BL)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = model.hidden(tokens_BL, where)
    assert kept.requires_grad
    return sum(int(event.self_cpu_memory_usage) for event in profiler.key_averages())


def test_each_step_of_activation_checkpointing_keeps_fewer_bytes() -> None:
    none, selective, full = (bytes_kept_for_backward(how) for how in ("none", "selective", "full"))
    assert full < 0.3 * selective < selective < 0.75 * none


def test_evaluation_recomputes_nothing() -> None:
    model, segments_BL = checkpointing("full").eval(), segments(24, row=24)
    with patch("trainer.model.decoder.checkpoint", side_effect=AssertionError("recomputed")):
        model(torch.zeros(1, 24, dtype=torch.int64), layout(segments_BL))


@settings(max_examples=20)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), size=st.sampled_from([1, 2, 24, 64]), seed=st.integers(0, 99))
def test_the_norm_on_a_cpu_equals_its_definition_with_its_gradients(shape: list[int], size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, *shape, size, generator=generator)
    norm = RMSNorm(size, 1e-3)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    results = []
    for forward, type_ in ((norm, torch.float32), (lambda x: norm_by_definition(x, norm.weight, norm.eps), torch.float64)):
        leaf, norm.weight.grad = x.detach().to(type_).requires_grad_(), None
        y = forward(leaf)
        y.backward(grad.to(type_))
        results.append([each.float() for each in (y, leaf.grad, norm.weight.grad) if each is not None])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def norm_by_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_the_norm_keeps_the_type_of_16_bit_inputs() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    norm = RMSNorm(8, 1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x.bfloat16()).float(), norm(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_rotation_turns_pairs_as_complex_numbers_and_its_gradient_turns_back(type_: torch.dtype) -> None:
    x, grad = torch.randn(2, 2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).to(type_)
    position_BL = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 700]])
    angles = position_BL[:, :, None, None].double() * 100.0 ** -(torch.arange(8).double() / 8)
    turn = torch.polar(torch.ones_like(angles), angles)
    leaf = x.requires_grad_()
    y = rotate(leaf, rotary_table(position_BL, 16, 100.0))
    torch.autograd.backward(y, grad)

    def turned(z: Tensor, by: Tensor) -> Tensor:
        pairs = torch.complex(*z.detach().double().chunk(2, dim=-1)) * by
        return torch.cat((pairs.real, pairs.imag), dim=-1).to(type_)

    torch.testing.assert_close(y, turned(x, turn), atol=2e-4 if type_ == torch.float32 else 2e-2, rtol=1e-4)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, turned(grad, turn.conj()), atol=2e-4 if type_ == torch.float32 else 2e-2, rtol=1e-4)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (build_model(CONFIG, 50, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_tied_embeddings_are_one_parameter() -> None:
    tied = parameters_by_name(build_model(CONFIG, 50, 0))
    untied = parameters_by_name(build_model(CONFIG.model_copy(update={"tie_embeddings": False}), 50, 0))
    assert set(untied) - set(tied) == {"lm_head.weight"}


def test_parameter_names_are_those_of_a_qwen3_checkpoint() -> None:
    names = set(parameters_by_name(build_model(CONFIG.model_copy(update={"layers": 1}), 50, 0)))
    layer = {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert names == {"model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.0.{name}" for name in layer)}


def test_without_the_norms_of_queries_and_keys_the_names_are_those_of_llama_and_the_other_weights_the_same() -> None:
    with_norms, without = (
        parameters_by_name(build_model(CONFIG.model_copy(update={"qk_norm": qk_norm}), 50, 0)) for qk_norm in (True, False)
    )
    assert {name.rpartition("self_attn.")[2] for name in with_norms.keys() - without.keys()} == {"q_norm.weight", "k_norm.weight"}
    assert all(torch.equal(weight, with_norms[name]) for name, weight in without.items())


def gpt2_by_definition(weights: dict[str, Tensor], tokens_L: Tensor, *, heads: int, layers: int, form: str) -> Tensor:
    def norm(x_LD: Tensor, name: str) -> Tensor:
        centred_LD = x_LD - x_LD.mean(-1, keepdim=True)
        scaled_LD = centred_LD / (centred_LD.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled_LD * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def through(x_LD: Tensor, name: str) -> Tensor:
        return x_LD @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    length = len(tokens_L)
    x_LD = weights["model.embed_tokens.weight"][tokens_L] + weights["model.embed_positions.weight"][:length]
    for number in range(layers):
        layer = f"model.layers.{number}"
        normed_LD = norm(x_LD, f"{layer}.input_layernorm")
        q, k, v = (through(normed_LD, f"{layer}.self_attn.{part}_proj").view(length, heads, -1).transpose(0, 1) for part in "qkv")
        scores_NLL = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + torch.full((length, length), -torch.inf).triu(1)
        attended_LD = (scores_NLL.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x_LD = x_LD + through(attended_LD, f"{layer}.self_attn.o_proj")
        inner_LF = through(norm(x_LD, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.up_proj")
        if form == "tanh":
            gelu_LF = 0.5 * inner_LF * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner_LF + 0.044715 * inner_LF**3)))
        else:
            gelu_LF = 0.5 * inner_LF * (1 + torch.erf(inner_LF / 2**0.5))
        x_LD = x_LD + through(gelu_LF, f"{layer}.mlp.down_proj")
    return norm(x_LD, "model.norm") @ weights["lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"].T


@pytest.mark.parametrize(("form", "tied"), [("tanh", True), ("exact", False)])
def test_a_block_of_gpt2_equals_its_definition_for_each_document(form: Literal["tanh", "exact"], *, tied: bool) -> None:
    config = ModelConfig(
        **{"block": "gpt2", "layers": 2, "width": 32, "heads": 4, "context": 48, "biases": True, "gelu": form, "norm_eps": 1e-5},
        tie_embeddings=tied,
        init_std=0.3,
    )
    model = build_model(config, 50, 1).double()
    weights = parameters_by_name(model)
    with torch.no_grad():
        for number, weight in enumerate(weights.values()):
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)), alpha=0.3)
    segments_BL = segments(29, 19, row=48)
    tokens_BL = torch.randint(0, 50, (1, 48), generator=torch.Generator().manual_seed(0))
    for backend in ("documents", "sdpa"):
        found_BLV = model(tokens_BL, make_layout(segments_BL, positions(segments_BL), backend))
        parts = tokens_BL[0].split([29, 19])
        expected = [
            gpt2_by_definition({name: one.double() for name, one in weights.items()}, part, heads=4, layers=2, form=form)
            for part in parts
        ]
        torch.testing.assert_close(found_BLV[0], torch.cat(expected)[:, : found_BLV.shape[-1]])


def test_a_block_of_gpt2_has_no_norms_of_queries_no_rotation_and_biases_only_if_they_are_set() -> None:
    config = CONFIG.model_copy(update={"block": "gpt2", "kv_heads": None, "layers": 1})
    plain, biased = (set(parameters_by_name(build_model(config.model_copy(update={"biases": on}), 50, 0))) for on in (False, True))
    assert {"model.embed_positions.weight", "model.layers.0.mlp.up_proj.weight"} <= plain
    assert not any("gate_proj" in name or "q_norm" in name or name.endswith("bias") for name in plain)
    vectors = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.up_proj")
    layer = {f"model.layers.0.{name}.bias" for name in (*vectors, "mlp.down_proj")}
    assert biased - plain == {*layer, "model.norm.bias"}
    with pytest.raises(ValueError, match=r"leave out model.head_dim, model.kv_heads"):
        ModelConfig(block="gpt2", heads=6, kv_heads=2)


def test_the_rows_of_the_embedding_can_be_set() -> None:
    model = ModelConfig(vocab_rows=317)
    assert model.padded_vocab(283) == 317
    assert build_model(CONFIG.model_copy(update={"vocab_rows": 317}), 283, 0).model.embed_tokens.num_embeddings == 317
    with pytest.raises(ConfigError, match=r"vocab_rows = 317, and the tokenizer has 318 tokens"):
        model.padded_vocab(318)


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    assert [ModelConfig(vocab_multiple=64).padded_vocab(size) for size in (1, 64, 65, 50257)] == [64, 64, 128, 50304]


def test_the_epsilon_of_the_norms_is_the_one_that_is_set() -> None:
    model = build_model(CONFIG.model_copy(update={"norm_eps": 1e-3}), 40, 0)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) > 2 * CONFIG.layers
    small = torch.full((1, 1, 32), 1e-2)
    assert all(norm.eps == 1e-3 for norm in norms)
    shown = norms[-1](small[..., : len(norms[-1].weight)])
    assert torch.allclose(shown, torch.full_like(shown, 1e-2 / (1e-4 + 1e-3) ** 0.5))


def types_of_the_stream(residual: str, kind: torch.dtype | None) -> set[torch.dtype]:
    model = build_model(CONFIG.model_copy(update={"residual": residual}), 100, 0)
    found: set[torch.dtype] = set()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _layer, inputs, output: found.update((inputs[0].dtype, output.dtype)))
    segments_BL = segments(12, row=12)
    with torch.autocast("cpu", kind or torch.bfloat16, enabled=kind is not None):
        model.hidden(torch.zeros_like(segments_BL, dtype=torch.int64), layout(segments_BL))
    return found


def test_the_residual_stream_has_the_format_that_is_set() -> None:
    assert types_of_the_stream("bf16", torch.bfloat16) == {torch.bfloat16}
    assert types_of_the_stream("fp32", torch.bfloat16) == {torch.float32}
    assert types_of_the_stream("auto", torch.bfloat16) == {torch.float32}  # on a CPU
    assert types_of_the_stream("bf16", torch.float16) == {torch.float32}  # its range is too small
    assert types_of_the_stream("bf16", None) == {torch.float32}


@pytest.mark.parametrize("residual", ["auto", "bf16"])
def test_a_model_without_memory_for_its_weights_can_be_traced(residual: str) -> None:
    with torch.device("meta"):
        model = Decoder(CONFIG.model_copy(update={"residual": residual}), 100)
        segments_BL = segments(12, row=12).to("meta")
        logits_BLV = model(torch.zeros(1, 12, dtype=torch.int64), Layout(torch.zeros_like(segments_BL), document_mask(segments_BL)))
    assert logits_BLV.shape == (1, 12, 100)


@given(window=st.integers(1, 9), pattern=st.text("SL", min_size=1, max_size=4), place=st.integers(0, 23))
@settings(max_examples=25)
def test_a_token_reaches_as_many_tokens_as_the_windows_of_all_layers_let_through(window: int, pattern: str, place: int) -> None:
    config = CONFIG.model_copy(update={"layers": 3, "init_std": 0.3, "window": window, "window_pattern": pattern})
    model, segments_BL = build_model(config, 50, seed=1).double(), segments(24, row=24)
    tokens_BL = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    others_BL = tokens_BL.clone()
    others_BL[0, place] = (others_BL[0, place] + 1) % 50
    is_whole = not all(config.windows)
    expected = [here >= place and (is_whole or here - place <= 3 * (window - 1)) for here in range(24)]
    with torch.no_grad():
        for backend in ("documents", "sdpa"):
            where = make_layout(segments_BL, positions(segments_BL), backend)
            before, after = (model(tokens, where) for tokens in (tokens_BL, others_BL))
            assert (before != after).any(-1)[0].tolist() == expected


def test_only_layers_with_a_window_rotate_by_the_base_of_the_window() -> None:
    tokens_BL, where = torch.arange(24)[None], layout(segments(24, row=24))

    def logits(**changes: object) -> Tensor:
        config = CONFIG.model_copy(update={"init_std": 0.2, "window": 24} | changes)
        return build_model(config, 50, seed=1)(tokens_BL, where).detach()

    linear = ("rope_type=linear", "factor=4")
    assert torch.equal(logits(window_rope_theta=100.0, rope_scaling=linear), logits(rope_theta=100.0))
    assert torch.equal(logits(window_rope_theta=100.0, window_pattern="L"), logits())
    mixed = logits(window_rope_theta=100.0, window_pattern="SL")
    assert not torch.equal(mixed, logits())
    assert not torch.equal(mixed, logits(rope_theta=100.0))
