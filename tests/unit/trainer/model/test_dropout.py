"""B rows, L tokens of a row, D width, N query heads, K key and value heads, H width of a head."""

import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.runs import tiny_config
from trainer.config import LossConfig, ModelConfig, TrainConfig
from trainer.data.batch import MicroBatch
from trainer.model.attention import Backend, Layout, attend, make_layout
from trainer.model.decoder import build_model
from trainer.model.dropout import EMBEDDING, MLP_OUTPUT, below, dropout, row_keys
from trainer.model.forward import LossModule, forward_pass

CPU = torch.device("cpu")
FLEX = pytest.param("flex", marks=pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"))
VOCAB, LENGTH = 60, 24
ONES_BLD = torch.ones(8, 64, 96)
SIGMAS = 5
"""The tests are deterministic. A fair mask is beyond this many standard deviations in one case of a million."""


def keys(step: int = 1, num_rows: int = 8, first_row: int = 0, draw: int = 0) -> Tensor:
    return row_keys(7, step, first_row, num_rows, CPU, draw)


def kept(keys_B: Tensor, rate: float = 0.5, site: int = EMBEDDING) -> Tensor:
    return dropout(ONES_BLD[: len(keys_B)], rate, keys_B, site) != 0


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_measured_share_is_the_rate_and_the_mean_stays(rate: float) -> None:
    y_BLD = dropout(ONES_BLD, rate, keys(), EMBEDDING)
    spread = SIGMAS * math.sqrt(rate * (1 - rate) / y_BLD.numel())
    assert (y_BLD == 0).double().mean().item() == pytest.approx(rate, abs=spread)
    assert y_BLD.double().mean().item() == pytest.approx(1, abs=spread / (1 - rate))
    assert y_BLD.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])


def test_without_a_rate_or_without_keys_the_tensor_itself_comes_back() -> None:
    assert dropout(ONES_BLD, 0.0, keys(), EMBEDDING) is ONES_BLD
    assert dropout(ONES_BLD, 0.5, None, EMBEDDING) is ONES_BLD


def test_numbers_that_are_not_finite_are_dropped_too() -> None:
    y_BLD = dropout(torch.full_like(ONES_BLD, math.inf), 0.5, keys(), EMBEDDING)
    assert set(y_BLD.unique().tolist()) == {0, math.inf}


def test_masks_of_other_steps_passes_layers_places_and_neighbours_are_independent() -> None:
    first = kept(keys())
    others = [
        kept(keys(step=2)),
        kept(keys(draw=1)),
        kept(keys(first_row=8)),
        kept(keys(), site=MLP_OUTPUT),
        kept(below(keys(), 1)),
        *(first.roll(distance, dims=dim) for dim in range(3) for distance in (1, 2, 3)),
    ]
    spread = SIGMAS * 0.5 / math.sqrt(first.numel())
    for other in others:
        assert (first == other).double().mean().item() == pytest.approx(0.5, abs=spread)


@settings(max_examples=30)
@given(seed=st.integers(0, (1 << 63) - 1), step=st.integers(0, 1 << 40), first=st.integers(0, 1 << 20), size=st.integers(1, 9))
def test_the_key_of_a_row_depends_on_its_place_in_the_global_batch_alone(seed: int, step: int, first: int, size: int) -> None:
    together = row_keys(seed, step, first, size, CPU)
    assert together.tolist() == [row_keys(seed, step, first + place, 1, CPU).item() for place in range(size)]
    assert 0 <= together.min() <= together.max() < 1 << 32


def test_the_masks_are_those_of_earlier_versions() -> None:
    assert row_keys(1337, 5, 2, 3, CPU).tolist() == [3036522121, 2255870456, 3252883027]
    mask_BLD = dropout(torch.ones(1, 1, 16), 0.5, torch.tensor([123]), MLP_OUTPUT) != 0
    assert mask_BLD.int().flatten().tolist() == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        1,
        0,
    ]


def rows_of(*lengths: list[int]) -> Tensor:
    """Rows with documents of these lengths, then padding."""
    rows = [[number for number, size in enumerate(row) for _ in range(size)] for row in lengths]
    return torch.tensor([row + [-1] * (LENGTH - len(row)) for row in rows], dtype=torch.int32)


def with_dropout(segments_BL: Tensor, backend: Backend, rate: float, keys_B: Tensor) -> Layout:
    return make_layout(segments_BL, torch.zeros_like(segments_BL), backend, keys_B=keys_B, dropout=rate)


def inputs(num_rows: int, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_rows, LENGTH, n, 16, generator=generator).transpose(1, 2) for n in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("lengths", [[7, 9, 5], [24], [8, 8, 8]])
def test_documents_and_sdpa_drop_the_same_probabilities(lengths: list[int], kv_heads: int) -> None:
    segments_BL, found = rows_of(lengths, [3, 20]), []
    for backend in ("documents", "sdpa"):
        q, k, v = (x.detach().requires_grad_() for x in inputs(2, kv_heads))
        y = attend(q, k, v, with_dropout(segments_BL, backend, 0.3, keys(num_rows=2)), dropout=0.3)
        y.square().sum().backward()
        found.append([y.detach(), q.grad, k.grad, v.grad])
    torch.testing.assert_close(found[0], found[1])
    plain = attend(*inputs(2, kv_heads), make_layout(segments_BL, segments_BL))
    assert (found[1][0] - plain).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_drops_the_same_probabilities() -> None:
    segments_BL = rows_of([7, 9, 5], [3, 20])
    flex, sdpa = (
        attend(*inputs(2), with_dropout(segments_BL, backend, 0.3, keys(num_rows=2)), dropout=0.3) for backend in ("flex", "sdpa")
    )
    torch.testing.assert_close(flex, sdpa)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_flex_has_the_gradients_of_sdpa() -> None:
    segments_BL, found = rows_of([7, 9, 5], [3, 20]).cuda(), []
    for backend in ("flex", "sdpa"):
        q, k, v = (x.cuda().requires_grad_() for x in inputs(2))
        y = attend(q, k, v, with_dropout(segments_BL, backend, 0.3, keys(num_rows=2).cuda()), dropout=0.3)
        y.square().sum().backward()
        found.append([y.detach(), q.grad, k.grad, v.grad])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["documents", "sdpa", FLEX])
def test_the_share_of_dropped_probabilities_is_the_rate(backend: Backend) -> None:
    """With all scores equal, values of one, and the last query of a row: each output is kept / (1 - rate) / LENGTH."""
    rate, num_rows = 0.2, 64
    q, k = torch.zeros(num_rows, 4, LENGTH, 16), torch.zeros(num_rows, 2, LENGTH, 16)
    layout = with_dropout(torch.zeros(num_rows, LENGTH, dtype=torch.int32), backend, rate, keys(num_rows=num_rows))
    last_BN = attend(q, k, torch.ones_like(k), layout, dropout=rate)[:, :, -1, 0]
    num_kept = last_BN * (1 - rate) * LENGTH
    torch.testing.assert_close(num_kept, num_kept.round(), rtol=0, atol=1e-3)
    assert last_BN.mean().item() == pytest.approx(1, abs=SIGMAS * math.sqrt(rate / (1 - rate) / last_BN.numel() / LENGTH))
    assert last_BN.unique().numel() > 5, "heads and rows have different masks"


def config_of(**model: object) -> TrainConfig:
    shares = {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.1}
    return tiny_config(Path("data"), Path("run"), model=shares | model)


def loss_module(config: TrainConfig) -> LossModule:
    return LossModule(build_model(config.model, VOCAB, seed=1), LossConfig())


def micro_batch() -> MicroBatch:
    segments_BL = rows_of([7, 9, 5], [3, 20], [24], [12, 4])
    tokens_BL = torch.arange(segments_BL.numel()).view_as(segments_BL) % VOCAB
    return MicroBatch(tokens_BL, segments_BL, torch.zeros_like(tokens_BL), (tokens_BL + 1) % VOCAB)


def pass_with(config: TrainConfig, backend: Backend, keys_B: Tensor | None = None) -> list[Tensor]:
    """Return the loss and the gradients of a forward and backward pass."""
    loss = loss_module(config)
    total = forward_pass(loss, micro_batch(), config, CPU, backend, keys_B=keys_B)
    total.backward()
    return [total.detach(), *(torch.as_tensor(weight.grad) for weight in loss.parameters())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["documents", "sdpa"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit(
    checkpointing: Literal["selective", "full"], backend: Backend, precision: str
) -> None:
    config = config_of().model_copy(update={"precision": precision})
    model = config.model.model_copy(update={"activation_checkpointing": checkpointing})
    plain, again = (pass_with(each, backend, keys(num_rows=4)) for each in (config, config.model_copy(update={"model": model})))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("share", ["attention_dropout", "residual_dropout", "embedding_dropout"])
def test_each_setting_alone_changes_the_loss_and_another_step_changes_it_again(share: str) -> None:
    nothing = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    config, plain = config_of(**nothing | {share: 0.3}), config_of(**nothing)
    losses = [
        pass_with(config, "documents", keys(step=1, num_rows=4))[0].item(),
        pass_with(config, "documents", keys(step=2, num_rows=4))[0].item(),
        pass_with(plain, "documents")[0].item(),
    ]
    assert len(set(losses)) == 3


def test_each_layer_has_keys_of_its_own() -> None:
    config, seen = config_of(layers=3), []
    loss = loss_module(config)
    for layer in loss.model.model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[2].keys_B))
    forward_pass(loss, micro_batch(), config, CPU, "documents", keys_B=keys(num_rows=4))
    assert len({*keys(num_rows=4).tolist(), *torch.cat(seen).tolist()}) == 4 * (1 + 3)


def test_an_evaluation_has_no_dropout() -> None:
    dropped, plain = config_of(), config_of(attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0)
    with torch.no_grad():
        found, expected = (
            forward_pass(loss_module(config), micro_batch(), config, CPU, "documents", by_row=True) for config in (dropped, plain)
        )
    assert torch.equal(found, expected)


def test_a_share_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="residual_dropout"):
        ModelConfig(residual_dropout=1.0)
