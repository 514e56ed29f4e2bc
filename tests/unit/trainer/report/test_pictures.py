"""Charts as PNG: any values, the same bytes, and marks at values that are not finite."""

from __future__ import annotations

import math
from io import BytesIO

import pytest
from PIL import Image

from common.html.chart import Chart, Curve, Line
from trainer.report.pictures import draw_png


def chart(*values: float) -> Chart:
    return Chart("Loss", "nats", (Line("training", Curve.of(enumerate(values, 1))),))


@pytest.mark.parametrize("values", [(), (1.0,), (1e-3, math.inf, 1e6), tuple(range(3000))])
def test_the_same_charts_make_a_png_whatever_their_values(values: tuple[float, ...]) -> None:
    chart = Chart("Loss $x_{$ \u202e", "nats", (Line("a $ b", Curve.of(enumerate(values)), points=True),), log_from=30.0)
    found = draw_png([chart], "run $\\frac 文 name")
    assert found.startswith(b"\x89PNG")
    assert int.from_bytes(found[16:20]) == 1600


def test_the_same_chart_gives_the_same_bytes_of_a_png() -> None:
    assert draw_png([chart(1.0, math.nan)], "run") == draw_png([chart(1.0, math.nan)], "run")


def test_a_png_marks_values_that_are_no_numbers_in_the_colour_of_the_crosses() -> None:
    def vermillion(*values: float) -> int:
        pixels = Image.open(BytesIO(draw_png([chart(*values)], "run"))).convert("RGB")
        return sum(count for count, colour in pixels.getcolors(1 << 24) or () if colour == (0xD5, 0x5E, 0x00))

    assert vermillion(1.0, 2.0, 3.0) == 0
    assert vermillion(1.0, math.nan, 3.0) > 20
