"""Histograms as inline SVG. Colours come from the page's style sheet, for light mode, dark mode and print."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from common.html.page import Plot, draw_template
from common.text import decimal

_PLOT = Plot(width=520, height=250, left=46, right=18, top=44, bottom=40)
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
    starts = [_PLOT.x(index / len(bins)) for index in range(len(bins) + 1)]
    return draw_template(
        "histogram.jinja",
        _PLOT,
        series=series,
        unit=unit,
        heights=[(_PLOT.y(number * step / top), f"{100 * number * step:g} %") for number in range(round(top / step) + 1)],
        widths=[(starts[index], label) for index, label in _labels(bins)],
        bars=[(x, _PLOT.y(part / top), words(one)) for x, part, one in zip(starts, shares[0], bins, strict=False)],
        bar_width=max(starts[1] - starts[0] - 1, 0.5),
        steps=[_steps(starts, [_PLOT.y(part / top) for part in line]) for line in shares[1:]],
        marks=list(_marks(bins, marks)),
    )


def _steps(starts: Sequence[float], heights: Sequence[float]) -> str:
    corners = [(x, y) for index, y in enumerate(heights) for x in starts[index : index + 2]]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


def _marks(bins: Sequence[Bin], marks: Mapping[str, float]) -> Iterator[tuple[float, float, int, str]]:
    """Yield x of the line, x and y of the label, and label of each mark. Up to three rows keep labels apart."""
    ends = [0.0, 0.0, 0.0]
    for label, value in sorted(marks.items(), key=lambda item: item[1]):
        x = _PLOT.x(_place_of(value, bins) / len(bins))
        half = len(label) * _LABEL_WIDTH / 2
        middle = min(max(x, _PLOT.left + half), _PLOT.end - half)
        level = next((level for level, end in enumerate(ends) if end <= middle - half), len(ends) - 1)
        ends[level] = middle + half
        yield x, middle, 13 * (level + 1) - 2, label


def _labels(bins: Sequence[Bin]) -> list[tuple[int, str]]:
    """Borders at powers of two, or all borders if there are fewer than three powers."""
    borders = [bin_.low for bin_ in bins] + [bins[-1].high]
    powers = [index for index, border in enumerate(borders) if border >= 1 and math.log2(border).is_integer()]
    labelled = powers if len(powers) > 2 else list(range(len(borders)))
    return [(index, decimal(borders[index])) for index in labelled[:: -(-len(labelled) // _MAX_LABELS)]]


def _place_of(value: float, bins: Sequence[Bin]) -> float:
    """Within a bin places are logarithmic, as the borders grow by factors."""
    for index, bin_ in enumerate(bins):
        if value < bin_.high:
            if bin_.low > 0:
                return index + math.log(max(value, bin_.low) / bin_.low) / math.log(bin_.high / bin_.low)
            return index + max(value, 0) / bin_.high
    return len(bins)
