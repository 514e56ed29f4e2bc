"""B rows   L tokens of a row   D width   V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainer.config import LossConfig
from trainer.data.batch import IGNORE
from trainer.model.formula import soft_cap
from trainer.model.loss import (
    cross_entropy_rows,
    cross_entropy_sum,
    default_chunk_tokens,
    linear_cross_entropy_rows,
    linear_cross_entropy_sum,
)

LOGITS = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[1, 2, IGNORE, 4, 5], [IGNORE] * 5, [0, 10, 3, 3, IGNORE]])
EVERY_OPTION = LossConfig(label_smoothing=0.1, z_loss=0.01, temperature=1.7, chunk_tokens=7)

options = st.builds(
    LossConfig,
    label_smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
    chunk_tokens=st.sampled_from([1, 3, 8, 100]),
)


@dataclass(frozen=True)
class Case:
    """Inputs of the loss, with some positions that have no target."""

    hidden_BLD: Tensor
    weight_VD: Tensor
    targets_BL: Tensor
    weights_BL: Tensor

    def differentiable(self) -> Case:
        hidden_BLD, weight_VD = (tensor.detach().clone().requires_grad_() for tensor in (self.hidden_BLD, self.weight_VD))
        return Case(hidden_BLD, weight_VD, self.targets_BL, self.weights_BL)

    def plain(self, choice: LossConfig) -> Tensor:
        return cross_entropy_sum(functional.linear(self.hidden_BLD, self.weight_VD), self.targets_BL, self.weights_BL, choice)

    def fused(self, choice: LossConfig) -> Tensor:
        return linear_cross_entropy_sum(self.hidden_BLD, self.weight_VD, self.targets_BL, choice, self.weights_BL)

    def gradients(self, loss: Callable[[Case], Tensor], incoming: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and its gradients by hidden states and weight."""
        case = self.differentiable()
        value = loss(case)
        by_hidden, by_weight = torch.autograd.grad(value * incoming, (case.hidden_BLD, case.weight_VD))
        return value.detach(), by_hidden, by_weight


def make_case(
    seed: int = 0, rows: int = 2, length: int = 9, width: int = 6, vocab: int = 23, kind: torch.dtype = torch.float32
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    targets_BL = torch.randint(0, vocab, (rows, length), generator=generator)
    targets_BL[torch.rand(rows, length, generator=generator) < 0.3] = IGNORE
    return Case(
        torch.randn(rows, length, width, generator=generator, dtype=kind),
        torch.randn(vocab, width, generator=generator, dtype=kind),
        targets_BL,
        torch.rand(rows, length, generator=generator, dtype=torch.float32),
    )


def by_definition(logits_BLV: Tensor, targets_BL: Tensor, weights_BL: Tensor, choice: LossConfig) -> float:
    total = 0.0
    positions = zip(logits_BLV.double().flatten(0, 1), targets_BL.flatten(), weights_BL.flatten(), strict=True)
    for logits, target, weight in positions:
        if target != IGNORE:
            scaled = logits / choice.temperature
            denominator = scaled.exp().sum().log()
            log_probabilities = scaled - denominator
            smoothed = (1 - choice.label_smoothing) * log_probabilities[target] + choice.label_smoothing * log_probabilities.mean()
            total += float(weight * (choice.z_loss * denominator**2 - smoothed))
    return total


@settings(max_examples=25)
@given(choice=options, seed=st.integers(0, 99))
def test_the_plain_sum_equals_its_definition(choice: LossConfig, seed: int) -> None:
    weights_BL = torch.rand(3, 5, generator=torch.Generator().manual_seed(seed))
    expected = by_definition(LOGITS, TARGETS, weights_BL, choice)
    assert float(cross_entropy_sum(LOGITS, TARGETS, weights_BL, choice)) == pytest.approx(expected, rel=1e-5)
    unweighted = by_definition(LOGITS, TARGETS, torch.ones(3, 5), choice)
    assert float(cross_entropy_sum(LOGITS, TARGETS, settings=choice)) == pytest.approx(unweighted, rel=1e-5)


def test_the_losses_of_positions_add_up_and_are_zero_without_a_target() -> None:
    losses_BL = cross_entropy_rows(LOGITS, TARGETS)
    assert losses_BL.dtype == torch.float32
    assert losses_BL.shape == TARGETS.shape
    assert not losses_BL[TARGETS == IGNORE].any()
    assert float(losses_BL.sum()) == pytest.approx(by_definition(LOGITS, TARGETS, torch.ones(3, 5), LossConfig()), rel=1e-6)


def test_logits_of_any_size_stay_finite() -> None:
    assert torch.isfinite(cross_entropy_sum(LOGITS * 1e4, TARGETS))
    case = make_case()
    value, by_hidden, by_weight = case.gradients(
        lambda c: linear_cross_entropy_sum(c.hidden_BLD * 1e4, c.weight_VD, c.targets_BL, EVERY_OPTION)
    )
    assert all(torch.isfinite(tensor).all() for tensor in (value, by_hidden, by_weight))
    reference = cross_entropy_sum((case.hidden_BLD * 1e4) @ case.weight_VD.T, case.targets_BL, settings=EVERY_OPTION)
    assert float(value) == pytest.approx(float(reference), rel=1e-5)


def test_half_precision_logits_are_summed_in_fp32() -> None:
    assert cross_entropy_sum(LOGITS.bfloat16(), TARGETS).dtype == torch.float32


def test_ignored_positions_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    torch.autograd.backward(cross_entropy_sum(logits, TARGETS))
    assert logits.grad is not None
    assert torch.all(logits.grad[TARGETS == IGNORE] == 0)
    assert torch.all(logits.grad[TARGETS != IGNORE].abs().sum(-1) > 0)


@settings(max_examples=40)
@given(choice=options, seed=st.integers(0, 999), rows=st.integers(1, 3), length=st.integers(1, 17), weighted=st.booleans())
def test_the_chunked_sum_and_its_gradients_equal_the_plain_ones(
    choice: LossConfig, seed: int, rows: int, length: int, weighted: bool
) -> None:
    case = make_case(seed, rows, length, kind=torch.float64)
    if not weighted:
        case = Case(case.hidden_BLD, case.weight_VD, case.targets_BL, torch.ones_like(case.weights_BL))

    def fused(case: Case) -> Tensor:
        weights_BL = case.weights_BL if weighted else None
        return linear_cross_entropy_sum(case.hidden_BLD, case.weight_VD, case.targets_BL, choice, weights_BL)

    for ours, plain in zip(case.gradients(fused, 0.37), case.gradients(lambda c: c.plain(choice), 0.37), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)


@settings(max_examples=10)
@given(choice=options, seed=st.integers(0, 99))
def test_the_gradient_is_that_of_finite_differences(choice: LossConfig, seed: int) -> None:
    case = make_case(seed, 1, 3, 3, 5, torch.float64).differentiable()
    assert torch.autograd.gradcheck(
        lambda hidden, weight: linear_cross_entropy_sum(hidden, weight, case.targets_BL, choice, case.weights_BL),
        (case.hidden_BLD, case.weight_VD),
    )


def test_in_fp32_the_gradients_equal_the_plain_ones_to_rounding() -> None:
    case = make_case(rows=4, length=64, width=32, vocab=301)
    choice = EVERY_OPTION.model_copy(update={"chunk_tokens": 48})
    for ours, plain in zip(case.gradients(lambda c: c.fused(choice)), case.gradients(lambda c: c.plain(choice)), strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - plain).abs().max()) <= 1e-6 * float(plain.abs().max())


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64, 100, 1000])
def test_the_chunk_changes_rounding_only(chunk_tokens: int) -> None:
    case = make_case(rows=4, length=64, width=32, vocab=301)
    whole = case.gradients(lambda c: c.fused(LossConfig(chunk_tokens=256)))
    chunked = case.gradients(lambda c: c.fused(LossConfig(chunk_tokens=chunk_tokens)))
    for a, b in zip(whole, chunked, strict=True):
        assert float((a - b).abs().max()) <= 1e-6 * float(a.abs().max())


def test_how_rows_are_cut_and_padded_changes_rounding_only() -> None:
    case = make_case(rows=4, length=16)
    pieces = [
        linear_cross_entropy_sum(
            functional.pad(case.hidden_BLD[row : row + 2], (0, 0, 0, 3), value=5.0),
            case.weight_VD,
            functional.pad(case.targets_BL[row : row + 2], (0, 3), value=IGNORE),
            EVERY_OPTION,
            functional.pad(case.weights_BL[row : row + 2], (0, 3), value=9.0),
        )
        for row in (0, 2)
    ]
    assert float(sum(pieces)) == pytest.approx(float(case.fused(EVERY_OPTION)), rel=1e-6)


def test_what_stands_at_a_position_without_target_changes_nothing() -> None:
    case = make_case()
    ignored_BL = case.targets_BL == IGNORE
    other = Case(
        torch.where(ignored_BL[..., None], 77.0, case.hidden_BLD),
        case.weight_VD,
        case.targets_BL,
        torch.where(ignored_BL, 1e9, case.weights_BL),
    )
    before, after = (one.gradients(lambda c: c.fused(EVERY_OPTION)) for one in (case, other))
    torch.testing.assert_close(after[0], before[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(after[2], before[2], rtol=1e-6, atol=1e-6)
    for value, by_hidden, _ in (before, after):
        assert value > 0
        assert torch.all(by_hidden[ignored_BL] == 0)
        assert torch.all(by_hidden[~ignored_BL].abs().sum(-1) > 0)


def test_a_batch_without_targets_is_zero_with_zero_gradients() -> None:
    case = make_case()
    case = Case(case.hidden_BLD, case.weight_VD, torch.full_like(case.targets_BL, IGNORE), case.weights_BL)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in case.gradients(lambda c: c.fused(EVERY_OPTION)))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that ran, and the size of the largest tensor that came out of one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result

    @property
    def products(self) -> int:
        return sum(name.startswith(("mm.", "addmm")) for name in self.names)


def test_the_logits_of_all_positions_never_exist_at_once() -> None:
    case = make_case(rows=2, length=64, width=4, vocab=500).differentiable()
    with Watch() as chunked:
        torch.autograd.backward(case.fused(EVERY_OPTION.model_copy(update={"chunk_tokens": 16})))
    with Watch() as plain:
        torch.autograd.backward(case.plain(EVERY_OPTION))
    assert chunked.largest == 16 * 500
    assert plain.largest == 2 * 64 * 500


def test_gradients_are_computed_only_where_they_are_wanted() -> None:
    case = make_case(rows=1, length=16).differentiable()
    choice = LossConfig(chunk_tokens=8)
    for hidden_BLD, weight_VD, products in (
        (case.hidden_BLD, case.weight_VD, 6),
        (case.hidden_BLD.detach(), case.weight_VD, 4),
        (case.hidden_BLD, case.weight_VD.detach(), 4),
        (case.hidden_BLD.detach(), case.weight_VD.detach(), 2),
    ):
        with Watch() as watch:
            linear_cross_entropy_sum(hidden_BLD, weight_VD, case.targets_BL, choice)
        assert watch.products == products
    with torch.no_grad(), Watch() as watch:
        value = case.fused(choice)
    assert watch.products == 2
    assert not value.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_same_as_ever(frozen: str) -> None:
    case = make_case().differentiable()
    both = dict(zip(("hidden", "weight"), case.gradients(lambda c: c.fused(EVERY_OPTION))[1:], strict=True))
    inputs = {"hidden": case.hidden_BLD, "weight": case.weight_VD}
    inputs[frozen].requires_grad_(False)
    torch.autograd.backward(case.fused(EVERY_OPTION))
    (other,) = set(inputs) - {frozen}
    assert inputs[frozen].grad is None
    gradient = inputs[other].grad
    assert gradient is not None
    assert torch.equal(gradient, both[other])


def test_a_weight_that_is_also_the_embedding_gets_both_gradients() -> None:
    case = make_case(kind=torch.float64)
    tokens_BL = case.targets_BL.clamp_min(0)
    losses: tuple[Callable[[Case], Tensor], ...] = (lambda c: c.fused(EVERY_OPTION), lambda c: c.plain(EVERY_OPTION))
    gradients = []
    for loss in losses:
        weight_VD = case.weight_VD.clone().requires_grad_()
        torch.autograd.backward(
            loss(Case(functional.embedding(tokens_BL, weight_VD).tanh(), weight_VD, case.targets_BL, case.weights_BL))
        )
        gradients.append(weight_VD.grad)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


def test_a_second_backward_pass_through_the_same_graph_gives_the_same_gradient() -> None:
    case = make_case().differentiable()
    value = case.fused(EVERY_OPTION)
    first = [gradient.clone() for gradient in torch.autograd.grad(value, (case.hidden_BLD, case.weight_VD), retain_graph=True)]
    again = torch.autograd.grad(value, (case.hidden_BLD, case.weight_VD))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_activation_checkpointing_changes_no_bit() -> None:
    case = make_case()

    def recomputed(case: Case) -> Tensor:
        value = checkpoint(lambda hidden: Case(hidden, *fixed(case)).fused(EVERY_OPTION), case.hidden_BLD, use_reentrant=False)
        assert isinstance(value, Tensor)
        return value

    def fixed(case: Case) -> tuple[Tensor, Tensor, Tensor]:
        return case.weight_VD, case.targets_BL, case.weights_BL

    plain, checkpointed = (case.gradients(loss) for loss in (lambda c: c.fused(EVERY_OPTION), recomputed))
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # of torch's own tracer
@pytest.mark.parametrize("kind", [None, torch.bfloat16])
def test_a_compiled_loss_is_one_graph_and_equals_the_eager_one(kind: torch.dtype | None) -> None:
    case = make_case()
    compiled = torch.compile(linear_cross_entropy_sum, backend="aot_eager", fullgraph=True, dynamic=False)

    def loss(function: Callable[..., Tensor]) -> Callable[[Case], Tensor]:
        def call(case: Case) -> Tensor:
            with torch.autocast("cpu", kind, enabled=kind is not None):
                return function(case.hidden_BLD, case.weight_VD, case.targets_BL, EVERY_OPTION, case.weights_BL)

        return call

    for a, b in zip(case.gradients(loss(compiled)), case.gradients(loss(linear_cross_entropy_sum)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def autocast(kind: torch.dtype, loss: Callable[[Case], Tensor]) -> Callable[[Case], Tensor]:
    def call(case: Case) -> Tensor:
        with torch.autocast("cpu", kind):
            return loss(case)

    return call


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_under_autocast_the_loss_is_the_plain_one_and_the_gradients_are_no_further_from_the_truth(kind: torch.dtype) -> None:
    case = make_case(rows=4, length=64, width=32, vocab=301)
    ours = case.gradients(autocast(kind, lambda c: c.fused(EVERY_OPTION)))
    plain = case.gradients(autocast(kind, lambda c: c.plain(EVERY_OPTION)))
    exact = case.gradients(lambda c: c.plain(EVERY_OPTION))
    assert float(ours[0]) == pytest.approx(float(plain[0]), rel=1e-6)
    for mine, theirs, truth in zip(ours[1:], plain[1:], exact[1:], strict=True):
        assert mine.dtype == torch.float32
        assert float((mine - truth).norm()) <= 1.05 * float((theirs - truth).norm())


def test_under_bf16_autocast_the_gradient_of_the_weight_is_added_up_in_fp32() -> None:
    case = make_case(rows=4, length=64)
    _, _, gradient = case.gradients(autocast(torch.bfloat16, lambda c: c.fused(EVERY_OPTION)))
    assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.parametrize("unit", [1e-10, 1.0, 1e6])
def test_fp16_gradients_are_scaled_before_they_are_rounded(unit: float) -> None:
    """With weights of 1e-10 a gradient that was fp16 before the loss scale came in would be zero, with 1e6 it would be infinite."""
    case = make_case(rows=4, length=32, width=16, kind=torch.float16)
    case = Case(case.hidden_BLD, case.weight_VD.float(), case.targets_BL, case.weights_BL * unit)
    exact = Case(case.hidden_BLD.double(), case.weight_VD.half().double(), case.targets_BL, case.weights_BL)
    incoming = {1e-10: 2**24, 1.0: 1.0, 1e6: 1e-3}[unit]
    ours = case.gradients(autocast(torch.float16, lambda c: c.fused(LossConfig(chunk_tokens=32))), incoming)[1:]
    truth = exact.gradients(lambda c: c.plain(LossConfig()), incoming)[1:]
    assert [gradient.dtype for gradient in ours] == [torch.float16, torch.float32]
    for mine, true in zip(ours, truth, strict=True):
        assert float((mine.double() - true).norm()) <= 0.01 * float(true.norm())


def test_in_fp16_pieces_that_the_model_thinks_impossible_still_get_their_gradient() -> None:
    """A probability of 1e-8 is zero in fp16, so the projection's rows of all unlikely pieces would never move."""
    weight_VD = torch.tensor([[0.0], [-math.log(1e8)]])
    hidden_BLD, targets_BL = torch.ones(1, 8, 1, dtype=torch.float16), torch.zeros(1, 8, dtype=torch.int64)
    weight_VD.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        torch.autograd.backward(linear_cross_entropy_sum(hidden_BLD, weight_VD, targets_BL))
    assert weight_VD.grad is not None
    assert float(weight_VD.grad[1]) == pytest.approx(8e-8, rel=0.05)


def test_in_fp16_the_gradient_of_the_weight_may_be_a_sum_beyond_fp16() -> None:
    """256 positions with states of 8 and slopes of -1/2, times the 256 of the fp16 scale, make 262,144; fp16 ends at 65,504."""
    weight_VD = torch.zeros(2, 1, requires_grad=True)
    hidden_BLD = torch.full((1, 256, 1), 8.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy_sum(hidden_BLD, weight_VD, torch.zeros(1, 256, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss, weight_VD)
    assert gradient.flatten().tolist() == [-1024.0, 1024.0]


def test_losses_from_hidden_states_equal_those_from_logits() -> None:
    case = make_case(rows=5, length=70)
    losses_BL = linear_cross_entropy_rows(case.hidden_BLD.requires_grad_(), case.weight_VD, case.targets_BL)
    assert losses_BL.dtype == torch.float32
    assert not losses_BL.requires_grad
    assert not losses_BL[case.targets_BL == IGNORE].any()
    from_logits_BL = cross_entropy_rows(case.hidden_BLD @ case.weight_VD.T, case.targets_BL).detach()
    torch.testing.assert_close(losses_BL, from_logits_BL, rtol=1e-5, atol=1e-6)


def test_the_losses_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    case = make_case(rows=12, length=3, width=384, vocab=301)
    together = linear_cross_entropy_rows(case.hidden_BLD, case.weight_VD, case.targets_BL)
    for size in (1, 5, 7):
        parts = zip(torch.split(case.hidden_BLD, size), torch.split(case.targets_BL, size), strict=True)
        apart = torch.cat([linear_cross_entropy_rows(hidden, case.weight_VD, targets) for hidden, targets in parts])
        assert torch.equal(apart, together)


@given(vocab_size=st.integers(1, 1 << 20), device_type=st.sampled_from(["cpu", "cuda"]))
def test_the_default_chunk_is_a_power_of_two_whose_logits_fit(vocab_size: int, device_type: str) -> None:
    chunk = default_chunk_tokens(vocab_size, device_type)
    allowed = {"cpu": 16 << 20, "cuda": 1 << 30}[device_type]
    assert chunk & (chunk - 1) == 0
    assert chunk == 64 or (64 < chunk <= allowed // (4 * vocab_size) < 2 * chunk)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_chunked_sum_equals_the_plain_one_and_is_deterministic(kind: torch.dtype) -> None:
    on_cpu = make_case(rows=4, length=64, width=32, vocab=304)
    case = Case(*(tensor.cuda() for tensor in (on_cpu.hidden_BLD, on_cpu.weight_VD, on_cpu.targets_BL, on_cpu.weights_BL)))

    def ours(case: Case) -> Tensor:
        with torch.autocast("cuda", kind, enabled=kind != torch.float32):
            return case.fused(EVERY_OPTION)

    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, again = case.gradients(ours), case.gradients(ours)
    finally:
        torch.use_deterministic_algorithms(was)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}[kind]
    for mine, true in zip(first, case.gradients(lambda c: c.plain(EVERY_OPTION)), strict=True):
        assert float((mine - true).norm()) <= tolerance * float(true.norm())


@pytest.mark.parametrize("choice", [LossConfig(chunk_tokens=4), EVERY_OPTION])
def test_with_a_soft_cap_losses_and_gradients_are_those_of_capped_logits(choice: LossConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    weights_BL = torch.rand(3, 5, generator=generator)
    first = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((3, 5, 6), (11, 6))]
    second = [tensor.detach().clone().requires_grad_() for tensor in first]
    plain = cross_entropy_sum(soft_cap(functional.linear(*first), 1.5), TARGETS, weights_BL, choice)
    fused = linear_cross_entropy_sum(*second, TARGETS, choice, weights_BL, softcap=1.5)
    torch.autograd.backward([plain, fused])
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close([tensor.grad for tensor in second], [tensor.grad for tensor in first])
    rows = linear_cross_entropy_rows(*second, TARGETS, softcap=1.5)
    torch.testing.assert_close(rows, cross_entropy_rows(soft_cap(functional.linear(*first), 1.5), TARGETS))
