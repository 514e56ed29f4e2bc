"""Draws a chart as inline SVG, coloured by the page's style sheet. A line's colour, dashes and marker each identify it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from common.html.chart import Chart, Line, measured, short
from common.html.page import Plot, draw_template

_PLOT = Plot(width=560, height=270, left=60, right=14, top=30, bottom=40)
_MAX_MARKERS = 40
_MARKERS = (
    "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0",  # disc
    "m-3.2 -3.2h6.4v6.4h-6.4z",  # square
    "m0 -4.2l4 7h-8z",  # triangle
    "m0 -4.6l4.6 4.6l-4.6 4.6l-4.6 -4.6z",  # diamond
    "m0 4.2l4 -7h-8z",  # triangle on its point
    "m-4.2 -1.2h3v-3h2.4v3h3v2.4h-3v3h-2.4v-3h-3z",  # cross
    "m-3 -4h6v8h-6z",  # upright
)
_LOOKS = len(_MARKERS)  # the style sheet has as many colours and dashes; the eighth line has the colour of the first
_CROSS = "m-3 -3l6 6m0 -6l-6 6"


def draw(chart: Chart) -> Markup:
    if not chart.shown:
        return Markup()
    return draw_template(
        "line_chart.jinja",
        _PLOT,
        chart=chart,
        unit=chart.unit + (", logarithmic" if chart.y.log else ""),
        cross=_CROSS,
        lines=[_drawn(line, chart) for line in chart.shown],
        heights=[(y, short(tick)) for y, tick in zip(_heights(chart, np.array(chart.y.ticks)), chart.y.ticks, strict=True)],
        widths=[(x, short(tick)) for x, tick in zip(_widths(chart, np.array(chart.x.ticks)), chart.x.ticks, strict=True)],
    )


def _drawn(line: Line, chart: Chart) -> dict[str, Any]:
    thinned = line.thinned
    x_C, y_C = _widths(chart, thinned.x_C), _heights(chart, thinned.mean_C)
    shape = (line.look + line.look // _LOOKS) % _LOOKS  # shifted after each round of colours, so that 49 lines differ
    strokes = (f"M{_points(x_C[run], y_C[run])}" + "h0" * (run.stop - run.start == 1) for run in _runs(~np.isnan(y_C)))
    has_markers = (line.points and len(x_C) <= _MAX_MARKERS) or len(x_C) == 1
    return {
        "name": line.name,
        "colour": line.look % _LOOKS,
        "shape": shape,  # of dashes and marker
        "faint": line.faint,
        "words": _words(line, chart.along),
        "band": _band(line, chart),
        "strokes": "".join(strokes),
        "xs": " ".join(f"{x:.7g}" for x in thinned.x_C.tolist()),
        "ys": " ".join(f"{y:.5g}" for y in thinned.mean_C.tolist()),
        "marker": _MARKERS[shape],
        "markers": [
            (float(x), float(y), f"{line.name} at {chart.along} {place:,.0f}: {measured(value)}")
            for x, y, place, value in zip(x_C, y_C, thinned.x_C.tolist(), thinned.mean_C.tolist(), strict=True)
            if has_markers and not np.isnan(y)
        ],
        "bad": _bad(line, chart),
    }


def _words(line: Line, along: str) -> str:
    finite = line.curve.finite
    if not len(finite):
        return f"{line.name}: no finite value"
    first, last = (short(float(line.curve.x_N[place])) for place in (0, -1))
    lowest, highest = measured(float(finite.min())), measured(float(finite.max()))
    ends = f"{measured(float(line.curve.y_N[0]))} at {along} {first}, {measured(float(line.curve.y_N[-1]))} at {along} {last}"
    return f"{line.name}: {ends}, lowest {lowest}, highest {highest}"


def _band(line: Line, chart: Chart) -> str:
    """Return the path around the range of each column, from lowest to highest value; empty if all columns are single points."""
    if line.thinned.whole:
        return ""
    x_C = _widths(chart, line.thinned.x_C)
    high_C, low_C = (_heights(chart, bound_C) for bound_C in (line.thinned.high_C, line.thinned.low_C))
    return "".join(
        f"M{_points(x_C[run], high_C[run])}L{_points(x_C[run][::-1], low_C[run][::-1])}Z"
        for run in _runs(~np.isnan(high_C) & ~np.isnan(low_C))
    )


def _bad(line: Line, chart: Chart) -> list[tuple[float, str]]:
    bad = line.thinned.bad_C > 0
    x_C, numbers = line.thinned.x_C[bad], line.thinned.bad_C[bad].tolist()
    return [
        (x, f"{line.name}: {number} value{'s' * (number > 1)} not finite at {chart.along} {place:,.0f}")
        for x, place, number in zip(_widths(chart, x_C).tolist(), x_C.tolist(), numbers, strict=True)
    ]


def _runs(there: NDArray[np.bool_]) -> Iterator[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0]))))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield slice(start, stop)


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return "L".join(f"{one:.1f} {other:.1f}" for one, other in zip(x.tolist(), y.tolist(), strict=True))


def _widths(chart: Chart, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return _PLOT.x(chart.x.places(values))


def _heights(chart: Chart, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return _PLOT.y(chart.y.places(values))
