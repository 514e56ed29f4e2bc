"""Draws a chart as inline SVG. Colours come from the page's style sheet, so that they follow light, dark and print.

Every line has a colour, dashes and a marker of its own, so that none of the three is needed to tell them apart. Its path carries
the numbers that it was drawn from, which the page's script shows under the pointer; the picture is complete without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.report.chart import Axis, Chart, Line
from trainer.report.parts import NOTHING, Html, element, join
from trainer.report.wording import decimal, short

__all__ = ["draw"]

_WIDTH, _HEIGHT = 560, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 30, 40
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
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
_LOOKS = len(_MARKERS)  # and colours and dashes in the style sheet; the eighth line has the first one's colour
_CROSS = "m-3 -3l6 6m0 -6l-6 6"


def draw(chart: Chart) -> Html:
    """A figure with the chart's title, legend and picture; nothing where the chart has no point."""
    if not chart.shown:
        return NOTHING
    legend = element("div", *(_key(line) for line in chart.shown), _bad_key(chart), class_="legend")
    caption = element("figcaption", element("b", chart.title), legend)
    return element("figure", caption, _picture(chart), element("p", class_="readout"), class_="chart")


def _picture(chart: Chart) -> Html:
    scale = ", logarithmic" if chart.y.log else ""
    return element(
        "svg",
        element("desc", "; ".join(_words(line, chart.along) for line in chart.shown)),
        element("text", f"{chart.unit}{scale}", x=2, y=14),
        _values_axis(chart.y),
        _places_axis(chart.x, chart.along),
        *(_band(line, chart) for line in chart.shown),
        *(_line(line, chart) for line in chart.shown),
        *(_markers(line, chart) for line in chart.shown if _has_markers(line)),
        *(_bad_marks(line, chart) for line in chart.shown),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{chart.title}: {', '.join(line.name for line in chart.shown)}, in {chart.unit}{scale}, over {chart.along}",
        data_low=f"{chart.x.low:.9g}",
        data_high=f"{chart.x.high:.9g}",
        data_left=_LEFT,
        data_right=_WIDTH - _RIGHT,
        data_along=chart.along,
    )


def _key(line: Line) -> Html:
    """The line's entry in the legend, drawn as the line is."""
    marker = element("path", d=f"M15 6{_MARKERS[_shape(line)]}", class_="marker") if _has_markers(line) else NOTHING
    stroke = element("path", d="M0 6H30", class_=_class("line", line))
    swatch = element("svg", stroke, marker, viewBox="0 0 30 12", aria_hidden="true", class_=f"key c{_colour(line)}")
    return element("span", swatch, element("span", line.name))


def _bad_key(chart: Chart) -> Html:
    if not any(line.thinned.bad_C.any() for line in chart.shown):
        return NOTHING
    cross = element("path", d=f"M15 6{_CROSS}", class_="bad")
    return element("span", element("svg", cross, viewBox="0 0 30 12", aria_hidden="true", class_="key"), "not a finite number")


def _words(line: Line, along: str) -> str:
    """The line for those who cannot see it."""
    finite = line.curve.finite
    if not len(finite):
        return f"{line.name}: no finite value"
    first, last = (short(float(line.curve.x_N[place])) for place in (0, -1))
    lowest, highest = decimal(float(finite.min())), decimal(float(finite.max()))
    ends = f"{decimal(float(line.curve.y_N[0]))} at {along} {first}, {decimal(float(line.curve.y_N[-1]))} at {along} {last}"
    return f"{line.name}: {ends}, lowest {lowest}, highest {highest}"


def _values_axis(axis: Axis) -> Html:
    lines = []
    for value, y in zip(axis.ticks, _heights(axis, np.array(axis.ticks)).tolist(), strict=True):
        lines.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        lines.append(element("text", short(value), x=_LEFT - 6, y=f"{y + 4:.1f}", class_="end"))
    return join(lines)


def _places_axis(axis: Axis, along: str) -> Html:
    base = _HEIGHT - _BOTTOM
    drawn = [element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=base, y2=base, class_="axis")]
    for value, x in zip(axis.ticks, _widths(axis, np.array(axis.ticks)).tolist(), strict=True):
        drawn.append(element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=base, y2=base + 4, class_="axis"))
        drawn.append(element("text", short(value), x=f"{x:.1f}", y=base + 17, class_="middle"))
    return join((*drawn, element("text", along, x=_LEFT + _PLOT_WIDTH / 2, y=_HEIGHT - 5, class_="middle")))


def _band(line: Line, chart: Chart) -> Html:
    """The range between the lowest and the highest value of each column, where a column is more than a point."""
    if line.thinned.whole:
        return NOTHING
    x_C = _widths(chart.x, line.thinned.x_C)
    bounds = [_heights(chart.y, bound_C) for bound_C in (line.thinned.high_C, line.thinned.low_C)]
    shapes = []
    for run in _runs(~np.isnan(bounds[0]) & ~np.isnan(bounds[1])):
        there = _points(x_C[run], bounds[0][run])
        back = _points(x_C[run][::-1], bounds[1][run][::-1])
        shapes.append(f"M{there}L{back}Z")
    return element("path", d="".join(shapes), class_=f"band c{_colour(line)}") if shapes else NOTHING


def _line(line: Line, chart: Chart) -> Html:
    x_C, y_C = _widths(chart.x, line.thinned.x_C), _heights(chart.y, line.thinned.mean_C)
    strokes = [f"M{_points(x_C[run], y_C[run])}" + ("h0" if run.stop - run.start == 1 else "") for run in _runs(~np.isnan(y_C))]
    return element(
        "path",
        d="".join(strokes),
        class_=_class("line", line),
        data_name=line.name,
        data_x=" ".join(f"{x:.7g}" for x in line.thinned.x_C.tolist()),
        data_y=" ".join(f"{y:.5g}" for y in line.thinned.mean_C.tolist()),
    )


def _markers(line: Line, chart: Chart) -> Html:
    x_C, y_C = _widths(chart.x, line.thinned.x_C).tolist(), _heights(chart.y, line.thinned.mean_C).tolist()
    values = zip(x_C, y_C, line.thinned.x_C.tolist(), line.thinned.mean_C.tolist(), strict=True)
    return join(
        element(
            "path",
            element("title", f"{line.name} at {chart.along} {place:,.0f}: {decimal(value)}"),
            d=f"M{x:.1f} {y:.1f}{_MARKERS[_shape(line)]}",
            class_=f"marker c{_colour(line)}",
        )
        for x, y, place, value in values
        if y == y  # noqa: PLR0124 - not nan
    )


def _bad_marks(line: Line, chart: Chart) -> Html:
    """Crosses at the upper edge, where values were not finite."""
    bad = line.thinned.bad_C > 0
    places, numbers = line.thinned.x_C[bad], line.thinned.bad_C[bad].tolist()
    return join(
        element(
            "path",
            element("title", f"{line.name}: {number} value{'s' * (number > 1)} not finite at {chart.along} {place:,.0f}"),
            d=f"M{x:.1f} {_TOP - 4}{_CROSS}",
            class_="bad",
        )
        for x, place, number in zip(_widths(chart.x, places).tolist(), places.tolist(), numbers, strict=True)
    )


def _has_markers(line: Line) -> bool:
    return line.points and len(line.thinned.x_C) <= _MAX_MARKERS


def _colour(line: Line) -> int:
    return line.look % _LOOKS


def _shape(line: Line) -> int:
    """Of dashes and marker: with each round of the colours another, so that 49 lines differ in one or the other."""
    return (line.look + line.look // _LOOKS) % _LOOKS


def _class(kind: str, line: Line) -> str:
    return f"{kind} c{_colour(line)} d{_shape(line)}{' faint' * line.faint}"


def _runs(there: NDArray[np.bool_]) -> Iterator[slice]:
    """The stretches of neighbours that are there."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0]))))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield slice(start, stop)


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return "L".join(f"{one:.1f} {other:.1f}" for one, other in zip(x.tolist(), y.tolist(), strict=True))


def _widths(axis: Axis, values: NDArray[np.float64] | Sequence[float]) -> NDArray[np.float64]:
    return _LEFT + _PLOT_WIDTH * axis.places(np.asarray(values, np.float64))


def _heights(axis: Axis, values: NDArray[np.float64] | Sequence[float]) -> NDArray[np.float64]:
    return _HEIGHT - _BOTTOM - _PLOT_HEIGHT * axis.places(np.asarray(values, np.float64))
