"""Histograms: heights in proportion to the shares, and marks at their values with labels that do not overlap."""

from __future__ import annotations

import re

import pytest

from common.html.histogram import Bin, draw_histogram


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
