"""Drawings as SVG: gaps, marks, envelopes, heights in proportion to the shares, and words for those who do not see them."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.html.chart import Chart, Curve, Line
from common.html.drawing import Bin, draw, draw_histogram


def chart(*values: float, **options: bool) -> Chart:
    return Chart("Loss", "nats", (Line("training", Curve.of(enumerate(values, 1)), **options),))


def paths(figure: str, kind: str) -> list[str]:
    """What is drawn by the paths of one class, outside of the legend."""
    drawn = figure.split('role="img"')[1]
    return re.findall(rf'<path (?:[^>]*?)d="([^"]*)"[^>]*class="{kind}[ "]', drawn)


@given(st.lists(st.floats(), min_size=1, max_size=30), st.booleans(), st.sampled_from([None, 30.0]))
def test_any_values_make_a_well_formed_picture_within_its_frame(values: list[float], points: bool, log_from: float | None) -> None:
    figure = draw(Chart("Loss", "nats", (Line("a < b", Curve.of(enumerate(values)), points=points),), log_from=log_from))
    ElementTree.fromstring(figure)
    drawn = "".join(re.findall(r' d="([^"]*)" class="line c', figure.split('role="img"')[1]))
    numbers = [float(word) for word in re.findall(r"-?\d+\.\d", drawn)]
    assert all(-1 <= number <= 570 for number in numbers)
    assert "nan" not in drawn


def test_a_value_that_is_no_number_leaves_a_gap_and_a_mark_that_names_its_step() -> None:
    figure = draw(chart(1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0))
    [line] = paths(figure, "line")
    assert line.count("M") == 3
    assert "h0" in line, "a point between two gaps is drawn as a dot"
    assert len(paths(figure, "bad")) == 2
    assert "training: 1 value not finite at step 3" in figure
    assert "not a finite number" in figure, "the legend explains the mark"


def test_a_curve_without_any_number_still_shows_its_marks() -> None:
    figure = draw(chart(math.nan, math.nan))
    assert len(paths(figure, "bad")) == 2
    assert "no finite value" in figure


def test_a_long_curve_has_an_envelope_and_a_bounded_size() -> None:
    spiky = [1.0 + (step == 77_777) * 50 for step in range(200_000)]
    figure = draw(chart(*spiky))
    [band] = paths(figure, "band")
    highest = min(float(y) for y in re.findall(r" ([\d.]+)", band.replace("Z", "")))
    assert highest < 50, "the one high value reaches the top of the plot"
    assert len(figure) < 60_000
    assert paths(draw(chart(1.0, 2.0)), "band") == []


def test_every_line_has_a_colour_and_dashes_of_its_own_and_later_rounds_other_dashes() -> None:
    lines = tuple(Line(str(number), Curve.of([(1, number), (2, number)]), look=number) for number in range(21))
    looks = re.findall(r'data-name="\d+"', figure := draw(Chart("t", "u", lines)))
    classes = re.findall(r'class="line (c\d d\d)" data-name', figure)
    assert len(looks) == len(set(classes)) == 21


def test_markers_of_few_points_say_their_values() -> None:
    figure = draw(chart(3.0, 2.25, points=True))
    assert "<title>training at step 2: 2.25</title>" in figure
    assert paths(draw(chart(*range(1, 100), points=True)), "marker") == []


def test_a_line_of_one_point_has_a_marker() -> None:
    assert "<title>training at step 1: 2</title>" in draw(chart(2.0))
    assert "<title>training at" not in draw(chart(2.0, 3.0))


def test_the_numbers_under_the_pointer_are_those_that_are_drawn() -> None:
    figure = draw(chart(1.5, math.nan, 2.5))
    assert 'data-x="1 2 3"' in figure
    assert 'data-y="1.5 nan 2.5"' in figure


def test_a_picture_describes_itself_in_words() -> None:
    figure = draw(chart(3.0, 1.0, 2.0))
    assert 'aria-label="Loss: training, in nats, over step"' in figure
    assert "training: 3 at step 1, 2 at step 3, lowest 1, highest 3" in figure


def test_a_chart_without_points_is_left_out() -> None:
    assert draw(chart()) == ""


def test_the_bars_of_a_histogram_have_the_heights_of_the_shares() -> None:
    bins = [Bin(1, 2, (10,)), Bin(2, 4, (20,)), Bin(4, 8, (0,)), Bin(8, 16, (10,))]
    chart = draw_histogram(bins, ("documents",), "length", {"P50": 3.0}, lambda one: f"{one.low} to {one.high}")
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" class="bin"', chart)]
    assert heights == pytest.approx([heights[1] / 2, heights[1], 0, heights[1] / 2], abs=0.1)
    [mark] = re.findall(r'<line x1="([\d.]+)"[^>]*class="mark"', chart)
    starts = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', chart)]
    assert starts[1] < float(mark) < starts[2], "3 lies within the bin from 2 to 4"


def test_marks_close_together_stand_in_lines_of_their_own() -> None:
    bins = [Bin(1 << k, 2 << k, (1,)) for k in range(10)]
    chart = draw_histogram(bins, ("documents",), "length", {"P90": 30.0, "P95": 31.0, "P99": 33.0}, str)
    heights = re.findall(r'y="(\d+)" class="middle strong"', chart)
    assert len(set(heights)) == 3
