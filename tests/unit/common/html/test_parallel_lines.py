"""Parallel coordinates."""

from __future__ import annotations

import math

import pytest

from common.html.parallel_lines import Coordinate, Record, draw_parallel


def test_places_of_numbers_logarithms_and_categories() -> None:
    assert Coordinate("a", (), 2.0, 4.0).place(3) == 0.5
    assert Coordinate("a", (), 1e-4, 1e-2, log=True).place(1e-3) == pytest.approx(0.5)
    assert Coordinate("a", (None, True, 1)).place(1) == 2.5 / 3
    assert Coordinate("a", (None, True, 1)).place(True) == 1.5 / 3
    assert Coordinate("a", (), 1.0, 1.0).place(1.0) == 0.5


def test_a_value_that_an_axis_cannot_show_has_no_place() -> None:
    assert Coordinate("a", (1, 2)).place(3) is None
    assert [Coordinate("a", (), 0.0, 1.0).place(value) for value in (math.nan, "x", True, None)] == [None] * 4
    assert Coordinate("a", (), 0.1, 1.0, log=True).place(0) is None


def test_a_line_has_a_gap_where_a_value_is_missing_and_the_best_one_is_drawn_last() -> None:
    axes = [Coordinate(name, (), 0.0, 1.0) for name in "abcd"]
    records = [
        Record({"a": 0.0, "b": 0.5, "c": 1.0, "d": 1.0}, "first", "best"),
        Record({"a": 0.0, "b": 1.0, "d": 0.5}, "second"),
    ]
    page = draw_parallel("Values", axes, records)
    assert page.index("second") < page.index("first")
    assert page.count('class="record') == 2
    assert 'd="M70.0 296.0L356.7 40.0M930.0 168.0" class="record other"' in page


def test_names_and_words_are_escaped_and_nothing_is_drawn_without_records() -> None:
    page = draw_parallel("<em>", [Coordinate("<i>", ("<u>",))], [Record({"<i>": "<u>"}, "<s>")])
    assert not any(tag in page for tag in ("<em>", "<i>", "<u>", "<s>"))
    assert draw_parallel("Values", [], []) == draw_parallel("Values", [Coordinate("a")], []) == ""
