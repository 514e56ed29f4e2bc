"""Columns, averages and axes: no peak is lost, no value that is not a number is hidden, nothing overflows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.html.chart import Chart, Curve, Line, average_window, axis_through, median, moving_average, thin

VALUES = st.lists(st.floats(width=64), min_size=0, max_size=300)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)


def curve(values: list[float]) -> Curve:
    return Curve.of(enumerate(values, 1))


@given(VALUES, st.integers(1, 40))
def test_columns_keep_every_peak_and_count_every_value_that_is_no_number(values: list[float], most: int) -> None:
    found = thin(curve(values), most)
    finite = [value for value in values if math.isfinite(value)]
    assert len(found.x_C) == min(len(values), most)
    assert int(found.bad_C.sum()) == len(values) - len(finite)
    if finite:
        assert np.nanmin(found.low_C) == min(finite)
        assert np.nanmax(found.high_C) == max(finite)
        there = ~np.isnan(found.mean_C)
        assert np.all(found.low_C[there] <= found.mean_C[there])
        assert np.all(found.mean_C[there] <= found.high_C[there])
    else:
        assert np.isnan(found.mean_C).all()
    assert np.all(np.diff(found.x_C) > 0)


@given(VALUES)
def test_a_short_curve_is_drawn_point_by_point(values: list[float]) -> None:
    found = thin(curve(values), 300)
    assert found.whole
    assert found.x_C.tolist() == list(range(1, len(values) + 1))
    assert [value for value in found.mean_C.tolist() if not math.isnan(value)] == [
        value for value in values if math.isfinite(value)
    ]


def test_the_columns_of_a_long_curve_have_equally_many_points() -> None:
    found = thin(curve([float(number) for number in range(1001)]), 10)
    assert not found.whole
    assert set((found.high_C - found.low_C + 1).tolist()) == {100.0, 101.0}
    assert found.mean_C[0] == pytest.approx(49.5)


def test_the_largest_numbers_do_not_overflow_a_mean() -> None:
    assert thin(curve([1.7e308] * 10), 2).mean_C.tolist() == [1.7e308] * 2


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=60), st.integers(1, 12))
def test_a_moving_average_is_the_mean_of_the_last_finite_values(values: list[float], window: int) -> None:
    found = moving_average(curve(values), window).y_N.tolist()
    for end in range(1, len(values) + 1):
        last = [value for value in values[max(0, end - window) : end] if math.isfinite(value)]
        if window > 1:
            assert found[end - 1] == pytest.approx(sum(last) / len(last), abs=1e-6) if last else math.isnan(found[end - 1])


def test_a_huge_loss_leaves_the_average_when_it_leaves_the_window() -> None:
    assert moving_average(curve([1e300, *[2.0] * 9]), 4).y_N[-1] == 2.0


def test_short_runs_are_not_averaged_and_long_ones_over_a_hundred_steps() -> None:
    assert [average_window(steps) for steps in (0, 1, 39, 40, 2000, 10**6)] == [1, 1, 1, 2, 100, 100]


def test_a_median_knows_only_numbers() -> None:
    assert median(np.array([math.nan, 1.0, 2.0, 9.0, math.inf])) == 2.0
    assert median(np.array([math.nan])) is None


@example([1.0, 5e-324], 8.0, 0.0).via("the smallest number above zero")
@given(st.lists(FINITE, min_size=1, max_size=20), st.sampled_from([None, 8.0, 30.0]), st.sampled_from([0.0, 0.05]))
def test_an_axis_holds_all_values_and_a_few_ticks(values: list[float], log_from: float | None, margin: float) -> None:
    axis = axis_through([np.array(values)], log_from=log_from, margin=margin)
    assert axis.low < axis.high
    assert axis.low <= max(min(values), -1e280)
    assert axis.high >= min(max(values), 1e280)
    assert len(axis.ticks) <= 8
    places = axis.places(np.array(values))
    assert np.all((places >= 0) & (places <= 1))
    assert np.all(np.diff(places[np.argsort(values)]) >= 0)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_a_linear_axis_has_between_three_and_six_ticks_within_it(low: float, width: float) -> None:
    axis = axis_through([np.array([low, low + width])])
    assert 1 < len(axis.ticks) <= 7
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)


def test_a_wide_range_is_logarithmic_only_where_that_is_wanted_and_possible() -> None:
    wide = np.array([0.1, 1000.0])
    assert axis_through([wide], log_from=30).log
    assert axis_through([wide], log_from=30).ticks == (0.1, 1.0, 10.0, 100.0, 1000.0)
    assert not axis_through([wide]).log
    assert not axis_through([wide, np.zeros(1)], log_from=30).log
    assert not axis_through([np.array([1.0, 29.0])], log_from=30).log


def test_a_logarithmic_axis_within_one_power_of_ten_still_has_ticks() -> None:
    assert axis_through([np.array([2.5, 90.0])], log_from=30).ticks == (5.0, 10.0, 20.0, 50.0)


def test_a_chart_shows_the_lines_that_have_points_from_zero_on() -> None:
    chart = Chart("t", "u", (Line("empty", Curve.of(())), Line("full", Curve.of([(5, 2.0), (9, 3.0)]))))
    assert [line.name for line in chart.shown] == ["full"]
    assert (chart.x.low, chart.x.high) == (0, 9)


@given(st.integers(1, 10**9))
def test_steps_are_written_down_as_whole_numbers(last: int) -> None:
    ticks = Chart("t", "u", (Line("a", Curve.of([(0, 1.0), (last, 2.0)])),)).x.ticks
    assert 1 < len(ticks) <= 7
    assert all(tick == int(tick) for tick in ticks)
