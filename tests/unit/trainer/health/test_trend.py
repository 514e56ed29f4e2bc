import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.health.convergence import trend


def test_the_slope_of_a_line_is_its_slope() -> None:
    found = trend([0, 10, 20, 40], [5, 6, 7, 9])
    assert found.slope == pytest.approx(0.1)


def test_a_rise_of_every_pair_has_the_highest_score() -> None:
    found = trend(range(10), [0.1 * number**2 for number in range(10)])
    assert found.score == pytest.approx(45 / np.sqrt(10 * 9 * 25 / 18))


def test_points_at_one_place_have_no_trend() -> None:
    assert (trend([3, 3, 3], [1, 2, 3]).slope, trend([], []).slope, trend([1], [1]).score) == (0.0, 0.0, 0.0)


@given(st.floats(-100, 100), st.integers(0, 2**32 - 1), st.floats(1e3, 1e9))
@settings(max_examples=50)
def test_a_quarter_of_wild_points_does_not_carry_the_slope_away(slope: float, seed: int, wild: float) -> None:
    generator = np.random.default_rng(seed)
    x = np.arange(40.0)
    y = slope * x
    y[generator.choice(40, 10, replace=False)] = generator.uniform(-wild, wild, 10)
    assert trend(list(x), list(y)).slope == pytest.approx(slope, abs=max(1.0, abs(slope)))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(-1000, 1000)), min_size=2, max_size=30), st.integers(-50, 50))
@settings(max_examples=50)
def test_neither_the_order_of_the_points_nor_their_level_matters(points: list[tuple[int, int]], level: int) -> None:
    x, y = zip(*points, strict=True)
    turned = trend(x[::-1], [value + level for value in y[::-1]])
    assert (turned.slope, turned.score) == pytest.approx((trend(x, y).slope, trend(x, y).score))
