import pytest
import torch

from trainer.loss import IGNORE, cross_entropy_rows, cross_entropy_sum

LOGITS = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[1, 2, IGNORE, 4, 5], [IGNORE] * 5, [0, 10, 3, 3, IGNORE]])


def by_definition(smoothing: float) -> float:
    total = 0.0
    for logits, target in zip(LOGITS.double().flatten(0, 1), TARGETS.flatten(), strict=True):
        if target != IGNORE:
            log_probabilities = logits - logits.exp().sum().log()
            total -= float((1 - smoothing) * log_probabilities[target] + smoothing * log_probabilities.mean())
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_sum_equals_its_definition(smoothing: float) -> None:
    assert float(cross_entropy_sum(LOGITS, TARGETS, smoothing)) == pytest.approx(by_definition(smoothing), rel=1e-6)


def test_row_sums_add_up_and_a_row_without_targets_is_zero() -> None:
    rows = cross_entropy_rows(LOGITS, TARGETS)
    assert rows.dtype == torch.float64
    assert rows[1] == 0
    assert float(rows.sum()) == pytest.approx(by_definition(0.0), rel=1e-6)


def test_logits_of_any_size_stay_finite() -> None:
    assert torch.isfinite(cross_entropy_sum(LOGITS * 1e4, TARGETS))


def test_half_precision_logits_are_summed_in_fp32() -> None:
    assert cross_entropy_sum(LOGITS.bfloat16(), TARGETS).dtype == torch.float32


def test_ignored_positions_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    cross_entropy_sum(logits, TARGETS).backward()
    assert logits.grad is not None
    assert torch.all(logits.grad[TARGETS == IGNORE] == 0)
    assert torch.all(logits.grad[TARGETS != IGNORE].abs().sum(-1) > 0)
