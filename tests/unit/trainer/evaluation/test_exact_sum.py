import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.evaluation.tally import NUM_PARTS, add_exactly, exact_sum, rounded_sum

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def sums(groups: list[int], values: list[float], num_groups: int = 3) -> NDArray[np.int64]:
    parts_GE = np.zeros((num_groups, NUM_PARTS), np.int64)
    add_exactly(parts_GE, np.array(groups, np.int64), np.array(values, np.float32))
    return parts_GE


@given(values=st.lists(st.tuples(st.integers(0, 2), finite)))
def test_a_sum_is_that_of_the_fractions(values: list[tuple[int, float]]) -> None:
    parts_GE = sums([group for group, _ in values], [value for _, value in values])
    for group in range(3):
        expected = sum((Fraction(value) for its, value in values if its == group), Fraction(0))
        assert exact_sum(parts_GE[group]) == expected
        assert rounded_sum(parts_GE[group]) == math.fsum(value for its, value in values if its == group)
    assert exact_sum(parts_GE.sum(axis=0)) == sum(map(exact_sum, parts_GE))


@given(values=st.lists(finite), cut=st.integers(0, 20))
def test_parts_that_are_added_elsewhere_make_the_same_integers(values: list[float], cut: int) -> None:
    whole = sums([0] * len(values), values)
    first, second = values[:cut], values[cut:][::-1]
    assert np.array_equal(sums([0] * len(first), first) + sums([0] * len(second), second), whole)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1.0, 6.234567, -(2.0**-20), float(np.finfo(np.float32).max)]
)
def test_single_numbers_come_back(value: float) -> None:
    assert rounded_sum(sums([0], [float(np.float32(value))])[0]) == float(np.float32(value))


def test_numbers_that_are_not_finite_stay_visible() -> None:
    parts_GE = sums([0, 0, 1, 1, 1, 2], [math.inf, 1.0, math.nan, math.inf, -math.inf, 1.0])
    assert rounded_sum(parts_GE[0]) == math.inf
    assert math.isnan(rounded_sum(parts_GE[1]))
    assert rounded_sum(parts_GE[2]) == 1.0
    with pytest.raises(ValueError, match="not finite"):
        exact_sum(parts_GE[0])


def test_ten_million_losses_lose_nothing() -> None:
    value = np.float32(1 / 3)
    parts_GE = np.zeros((1, NUM_PARTS), np.int64)
    some = np.full(100_000, value)
    for _ in range(100):
        add_exactly(parts_GE, np.zeros(len(some), np.int64), some)
    assert exact_sum(parts_GE[0]) == 10_000_000 * Fraction(float(value))
