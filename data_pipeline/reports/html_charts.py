"""Histograms as inline SVG. Colours come from the page's style sheet, so that they follow light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.text import decimal
from data_pipeline.reports.html_parts import Html, element, join, text

__all__ = ["Bin", "histogram"]

_WIDTH, _HEIGHT = 520, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 44, 40
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_LABEL_WIDTH = 9  # of one character, with room around it
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
_MAX_LABELS = 7


@dataclass(frozen=True)
class Bin:
    """Values from `low` to below `high`."""

    low: float
    high: float
    counts: tuple[int, ...]
    """One for each series: the first is drawn as bars, the second as a line."""


def histogram(
    bins: Sequence[Bin], series: Sequence[str], unit: str, marks: Mapping[str, float], words: Callable[[Bin], str]
) -> Html:
    """Shares of each series by bin, with named vertical marks at values.

    Args:
        bins: without gaps, rising; all are drawn equally wide.
        series: the names of the counts, for the legend.
        unit: what the values are, for the axis.
        marks: values by their label.
        words: what is said about a bin where the pointer rests.
    """
    totals = [max(sum(bin_.counts[place] for bin_ in bins), 1) for place in range(len(series))]
    shares = [[bin_.counts[place] / total for bin_ in bins] for place, total in enumerate(totals)]
    step = next((step for step in _STEPS if max(map(max, shares)) <= 4 * step), _STEPS[-1])
    top = step * max(math.ceil(max(map(max, shares)) / step - 1e-9), 1)
    return element(
        "svg",
        _grid(step, top),
        _bars(bins, shares[0], top, words),
        *(_line(line, top) for line in shares[1:]),
        _marks(bins, marks),
        _axis(bins, unit),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"Histogram of {' and '.join(series)} by {unit}",
    )


def _grid(step: float, top: float) -> Html:
    lines = []
    for number in range(round(top / step) + 1):
        y = _y(number * step, top)
        lines.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid" if number else "axis"))
        lines.append(element("text", f"{100 * number * step:g} %", x=_LEFT - 6, y=y + 4, class_="end"))
    return join(lines)


def _bars(bins: Sequence[Bin], shares: Sequence[float], top: float, words: Callable[[Bin], str]) -> Html:
    width = _PLOT_WIDTH / len(bins)
    return join(
        element(
            "rect",
            element("title", words(bin_)),
            x=_places(_x(index, len(bins)) + 0.5),
            y=_y(part, top),
            width=_places(max(width - 1, 0.5)),
            height=_places(_HEIGHT - _BOTTOM - _y(part, top)),
            class_="bin",
        )
        for index, (bin_, part) in enumerate(zip(bins, shares, strict=True))
    )


def _line(shares: Sequence[float], top: float) -> Html:
    """Steps over the bins."""
    corners = []
    for index, part in enumerate(shares):
        corners += [f"{_x(place, len(shares)):.1f},{_y(part, top)}" for place in (index, index + 1)]
    return element("polyline", points=" ".join(corners), class_="line")


def _marks(bins: Sequence[Bin], marks: Mapping[str, float]) -> Html:
    """Vertical lines, their labels in as many lines above the plot as they need."""
    drawn = []
    ends = [0.0, 0.0, 0.0]
    for label, value in sorted(marks.items(), key=lambda item: item[1]):
        x = _place_of(value, bins)
        half = len(label) * _LABEL_WIDTH / 2
        middle = min(max(x, _LEFT + half), _WIDTH - _RIGHT - half)
        level = next((level for level, end in enumerate(ends) if end <= middle - half), len(ends) - 1)
        ends[level] = middle + half
        y = 13 * (level + 1) - 2
        drawn.append(element("line", x1=_places(x), x2=_places(x), y1=y + 3, y2=_HEIGHT - _BOTTOM, class_="mark"))
        drawn.append(element("text", label, x=_places(middle), y=y, class_="middle strong"))
    return join(drawn)


def _axis(bins: Sequence[Bin], unit: str) -> Html:
    """Labels at powers of two, or where there are few of those at any borders."""
    borders = [bin_.low for bin_ in bins] + [bins[-1].high]
    powers = [index for index, border in enumerate(borders) if border >= 1 and math.log2(border).is_integer()]
    labelled = powers if len(powers) > 2 else list(range(len(borders)))
    labelled = labelled[:: -(-len(labelled) // _MAX_LABELS)]
    ticks = []
    for index in labelled:
        x = _places(_x(index, len(bins)))
        ticks.append(element("line", x1=x, x2=x, y1=_HEIGHT - _BOTTOM, y2=_HEIGHT - _BOTTOM + 4, class_="axis"))
        ticks.append(element("text", decimal(borders[index]), x=x, y=_HEIGHT - _BOTTOM + 17, class_="middle"))
    return join((*ticks, element("text", text(unit), x=_LEFT + _PLOT_WIDTH / 2, y=_HEIGHT - 5, class_="middle")))


def _place_of(value: float, bins: Sequence[Bin]) -> float:
    """Where a value stands, between equally wide bins whose borders grow by factors."""
    for index, bin_ in enumerate(bins):
        if value < bin_.high:
            if bin_.low > 0:
                part = math.log(max(value, bin_.low) / bin_.low) / math.log(bin_.high / bin_.low)
            else:
                part = max(value, 0) / bin_.high
            return _x(index + part, len(bins))
    return _x(len(bins), len(bins))


def _x(place: float, num_bins: int) -> float:
    return _LEFT + _PLOT_WIDTH * place / num_bins


def _y(part: float, top: float) -> float:
    return _places(_HEIGHT - _BOTTOM - _PLOT_HEIGHT * part / top)


def _places(value: float) -> float:
    """Tenths of a unit are enough for a picture."""
    return round(value, 1)
