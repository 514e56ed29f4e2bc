"""B rows, L tokens of a row, D width, N query heads, K key and value heads, H width of a head, V vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.attention import attend, document_mask
from trainer.config import ModelConfig
from trainer.model import build_model, parameters_by_name, rotary_table, rotate

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


def plain_attention(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, segments_BL: Tensor) -> Tensor:
    """Attention by its definition: one query at a time, over the keys of its document up to itself."""
    group = q_BNLH.shape[1] // k_BKLH.shape[1]
    out_BNLH = torch.empty_like(q_BNLH)
    for b, row_L in enumerate(segments_BL):
        for n in range(q_BNLH.shape[1]):
            for i in range(len(row_L)):
                seen = [j for j in range(i + 1) if row_L[j] == row_L[i]]
                scores = torch.stack([q_BNLH[b, n, i] @ k_BKLH[b, n // group, j] for j in seen]) / q_BNLH.shape[-1] ** 0.5
                out_BNLH[b, n, i] = scores.softmax(0) @ v_BKLH[b, n // group, seen]
    return out_BNLH


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3), kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_attention_equals_its_definition(lengths: list[int], kv_heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, 24, 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    segments_BL = segments(*lengths, row=24)
    torch.testing.assert_close(attend(q, k, v, document_mask(segments_BL)), plain_attention(q, k, v, segments_BL))


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_changing_one_document_leaves_the_logits_of_the_others_bitwise_unchanged(changed: int) -> None:
    model = build_model(CONFIG, 50, seed=1)
    segments_BL = segments(7, 9, 5, row=24)
    tokens_BL = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    others_BL = torch.where(segments_BL == changed, (tokens_BL + 1) % 50, tokens_BL)
    before, after = (model(tokens, segments_BL, positions(segments_BL)) for tokens in (tokens_BL, others_BL))
    assert torch.equal(before[segments_BL != changed], after[segments_BL != changed])
    assert not torch.equal(before[segments_BL == changed], after[segments_BL == changed])


def test_a_document_reads_the_same_wherever_it_stands_in_a_row() -> None:
    model = build_model(CONFIG, 50, seed=1)
    document = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(0))
    alone, after_another = segments(9, row=9), segments(8, 9, row=17)
    logits_alone = model(document[None], alone, positions(alone))
    row = torch.cat((torch.zeros(8, dtype=torch.int64), document))[None]
    torch.testing.assert_close(model(row, after_another, positions(after_another))[:, 8:], logits_alone)


def test_no_token_sees_a_later_one() -> None:
    model = build_model(CONFIG, 50, seed=1)
    segments_BL = segments(24, row=24)
    tokens_BL = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    later_BL = tokens_BL.clone()
    later_BL[0, 12:] = 3
    before, after = (model(tokens, segments_BL, positions(segments_BL)) for tokens in (tokens_BL, later_BL))
    assert torch.equal(before[:, :12], after[:, :12])


@given(shift=st.integers(0, 500), distance=st.integers(0, 50))
@settings(deadline=None, max_examples=20)
def test_rotation_makes_scores_depend_on_distance_only(shift: int, distance: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)

    def score(query_position: int, key_position: int) -> float:
        at = [rotary_table(torch.tensor([[p]]), 16, 10_000.0) for p in (query_position, key_position)]
        return float((rotate(q, at[0]) * rotate(k, at[1])).sum())

    assert score(shift + distance, shift) == pytest.approx(score(distance, 0), abs=1e-3)


def test_gradients_agree_with_and_without_activation_checkpointing() -> None:
    gradients = []
    for setting in ("none", "full"):
        model = build_model(CONFIG.model_copy(update={"activation_checkpointing": setting}), 50, seed=1)
        segments_BL = segments(10, 14, row=24)
        model(torch.zeros(1, 24, dtype=torch.int64), segments_BL, positions(segments_BL)).float().logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in parameters_by_name(model).values()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


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


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    assert [ModelConfig(vocab_multiple=64).padded_vocab(size) for size in (1, 64, 65, 50257)] == [64, 64, 128, 50304]
