"""The warning about a loss of the user that is far from cross-entropy."""

import math

import pytest

from trainer.extensions.hooks import initial_loss_warning
from trainer.runs.state import Evaluated


def measured(loss: float | None) -> list[Evaluated]:
    return [Evaluated(0, loss, None)]


@pytest.mark.parametrize("loss", [2.1, 6.0, 17.9, math.nan, math.inf])
def test_a_loss_within_a_factor_of_three_or_without_a_value_is_no_reason(loss: float) -> None:
    assert initial_loss_warning(loss, measured(6.0), 10) is None


@pytest.mark.parametrize("loss", [0.0, -6.0, 1.9, 18.1, 6.0 * 1024])
def test_a_loss_that_is_far_away_is_told_with_both_numbers(loss: float) -> None:
    warning = initial_loss_warning(loss, measured(6.0), 10)
    assert warning is not None
    assert f"is {loss:.4g} for each target" in warning
    assert "is about 6;" in warning


def test_without_an_evaluation_the_loss_is_compared_with_that_of_equal_probabilities() -> None:
    assert initial_loss_warning(7.0, (), 1000) is None
    assert "is about 6.908;" in str(initial_loss_warning(7.0 / 512, (), 1000))
    assert initial_loss_warning(7.0 / 512, measured(None), 1000) is None
