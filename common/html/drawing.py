"""Draws line charts and histograms as inline SVG.

The page's style sheet has the colours for light mode, dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from common.html.chart import Axis, Chart, Floats, Line, measured, short
from common.html.page import template_environment
from common.text import decimal

Number = TypeVar("Number", float, Floats)

_PICTURES = template_environment(Path(__file__).parent, tenths="{:.1f}".format)


@dataclass(frozen=True)
class _Plot:
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def end(self) -> int:
        return self.width - self.right

    @property
    def base(self) -> int:
        return self.height - self.bottom

    def x(self, part: Number) -> Number:
        return self.left + (self.end - self.left) * part

    def y(self, part: Number) -> Number:
        return self.base - (self.base - self.top) * part

    def draw(self, template: str, **values: object) -> Markup:
        return Markup(_PICTURES.get_template(template).render(plot=self, **values))


_LINES = _Plot(width=560, height=270, left=60, right=14, top=30, bottom=40)
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
    """Return a figure. A line's colour, dashes and marker each identify it. Empty if no line has a value."""
    if not chart.shown:
        return Markup()
    return _LINES.draw(
        "line_chart.jinja",
        chart=chart,
        unit=chart.unit + (", logarithmic" if chart.y.log else ""),
        cross=_CROSS,
        lines=[_drawn(line, chart) for line in chart.shown],
        heights=[(y, short(tick)) for y, tick in zip(_LINES.y(_places(chart.y)), chart.y.ticks, strict=True)],
        widths=[(x, short(tick)) for x, tick in zip(_LINES.x(_places(chart.x)), chart.x.ticks, strict=True)],
    )


def _places(axis: Axis) -> Floats:
    return axis.places(np.array(axis.ticks))


def _drawn(line: Line, chart: Chart) -> dict[str, Any]:
    thinned = line.thinned
    x_C = _LINES.x(chart.x.places(thinned.x_C))
    y_C, high_C, low_C = (_LINES.y(chart.y.places(each_C)) for each_C in (thinned.mean_C, thinned.high_C, thinned.low_C))
    shape = (line.look + line.look // _LOOKS) % _LOOKS  # shifted after each round of colours, so that 49 lines differ
    has_markers = (line.points and len(x_C) <= _MAX_MARKERS) or len(x_C) == 1
    columns = list(zip(*(each.tolist() for each in (x_C, y_C, thinned.x_C, thinned.mean_C, thinned.bad_C)), strict=True))
    return {
        "name": line.name,
        "colour": line.look % _LOOKS,
        "shape": shape,  # of dashes and marker
        "faint": line.faint,
        "words": _words(line, chart.along),
        "strokes": "".join(f"M{_points(x_C[run], y_C[run])}" + "h0" * (run.stop - run.start == 1) for run in _runs(~np.isnan(y_C))),
        "band": ""  # around the range of each column, from lowest to highest value
        if thinned.whole
        else "".join(
            f"M{_points(x_C[run], high_C[run])}L{_points(x_C[run][::-1], low_C[run][::-1])}Z"
            for run in _runs(~np.isnan(high_C) & ~np.isnan(low_C))
        ),
        "xs": " ".join(f"{x:.7g}" for x in thinned.x_C.tolist()),
        "ys": " ".join(f"{y:.5g}" for y in thinned.mean_C.tolist()),
        "marker": _MARKERS[shape],
        "markers": [
            (x, y, f"{line.name} at {chart.along} {place:,.0f}: {measured(value)}")
            for x, y, place, value, _ in columns
            if has_markers and not math.isnan(y)
        ],
        "bad": [
            (x, f"{line.name}: {bad} value{'s' * (bad > 1)} not finite at {chart.along} {place:,.0f}")
            for x, _, place, _, bad in columns
            if bad
        ],
    }


def _words(line: Line, along: str) -> str:
    finite = line.curve.finite
    if not len(finite):
        return f"{line.name}: no finite value"
    first, last = (short(float(line.curve.x_N[place])) for place in (0, -1))
    lowest, highest = measured(float(finite.min())), measured(float(finite.max()))
    ends = f"{measured(float(line.curve.y_N[0]))} at {along} {first}, {measured(float(line.curve.y_N[-1]))} at {along} {last}"
    return f"{line.name}: {ends}, lowest {lowest}, highest {highest}"


def _runs(there: NDArray[np.bool_]) -> Iterator[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0]))))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield slice(start, stop)


def _points(x: Floats, y: Floats) -> str:
    return "L".join(f"{one:.1f} {other:.1f}" for one, other in zip(x.tolist(), y.tolist(), strict=True))


_BARS = _Plot(width=520, height=250, left=46, right=18, top=44, bottom=40)
_LABEL_WIDTH = 9  # of one character with margins, in units of the picture
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
_MAX_LABELS = 7


@dataclass(frozen=True)
class Bin:
    low: float
    high: float
    counts: tuple[int, ...]  # one count for each series. The first series is drawn as bars, the second as a line.


def draw_histogram(
    bins: Sequence[Bin], series: Sequence[str], unit: str, marks: Mapping[str, float], words: Callable[[Bin], str]
) -> Markup:
    """Return a figure with the share of each series by bin, all bins equally wide; `words` describes a bin under the pointer."""
    totals = [max(sum(bin_.counts[place] for bin_ in bins), 1) for place in range(len(series))]
    shares = [[bin_.counts[place] / total for bin_ in bins] for place, total in enumerate(totals)]
    step = next((step for step in _STEPS if max(map(max, shares)) <= 4 * step), _STEPS[-1])
    top = step * max(math.ceil(max(map(max, shares)) / step - 1e-9), 1)
    starts = [_BARS.x(index / len(bins)) for index in range(len(bins) + 1)]
    borders = [bin_.low for bin_ in bins] + [bins[-1].high]
    powers = [index for index, border in enumerate(borders) if border >= 1 and math.log2(border).is_integer()]
    labelled = powers if len(powers) > 2 else range(len(borders))  # powers of two, or all borders if there are fewer than three
    return _BARS.draw(
        "histogram.jinja",
        series=series,
        unit=unit,
        heights=[(_BARS.y(number * step / top), f"{100 * number * step:g} %") for number in range(round(top / step) + 1)],
        widths=[(starts[index], decimal(borders[index])) for index in labelled[:: -(-len(labelled) // _MAX_LABELS)]],
        bars=[(x, _BARS.y(part / top), words(one)) for x, part, one in zip(starts, shares[0], bins, strict=False)],
        bar_width=max(starts[1] - starts[0] - 1, 0.5),
        steps=[
            " ".join(f"{x:.1f},{_BARS.y(part / top):.1f}" for index, part in enumerate(line) for x in starts[index : index + 2])
            for line in shares[1:]
        ],
        marks=list(_marks(bins, marks)),
    )


def _marks(bins: Sequence[Bin], marks: Mapping[str, float]) -> Iterator[tuple[float, float, int, str]]:
    """Yield x of the line, x and y of the label, and label of each mark. Up to three rows keep labels apart."""
    ends = [0.0, 0.0, 0.0]
    for label, value in sorted(marks.items(), key=lambda item: item[1]):
        x = _BARS.x(_place_of(value, bins) / len(bins))
        half = len(label) * _LABEL_WIDTH / 2
        middle = min(max(x, _BARS.left + half), _BARS.end - half)
        level = next((level for level, end in enumerate(ends) if end <= middle - half), len(ends) - 1)
        ends[level] = middle + half
        yield x, middle, 13 * (level + 1) - 2, label


def _place_of(value: float, bins: Sequence[Bin]) -> float:
    """Within a bin places are logarithmic, as the borders grow by factors."""
    for index, bin_ in enumerate(bins):
        if value < bin_.high:
            if bin_.low > 0:
                return index + math.log(max(value, bin_.low) / bin_.low) / math.log(bin_.high / bin_.low)
            return index + max(value, 0) / bin_.high
    return len(bins)
