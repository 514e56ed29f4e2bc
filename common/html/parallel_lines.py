"""Draws parallel coordinates as inline SVG: an axis for each quantity, a line for each record. Good records are drawn last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from common.html.page import Plot, draw_template

_HEIGHT, _TOP, _BOTTOM = 320, 40, 24
_AXIS_WIDTH, _SIDE, _MIN_WIDTH = 150, 70, 1000
_MAX_TICKS = 8
_MAX_LABEL = 26

Rank = Literal["best", "good", "other"]


@dataclass(frozen=True)
class Coordinate:
    name: str
    values: tuple[Any, ...] = ()  # of categories, from bottom to top; empty for an axis of numbers
    low: float = 0.0
    high: float = 1.0
    log: bool = False

    def place(self, value: Any) -> float | None:
        """From 0 (bottom) to 1 (top); None if the axis cannot show the value."""
        if self.values:
            index = next((index for index, one in enumerate(self.values) if type(one) is type(value) and one == value), None)
            return None if index is None else (index + 0.5) / len(self.values)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        low, high, found = self.low, self.high, float(value)
        if self.log:
            if found <= 0:
                return None
            low, high, found = math.log(low), math.log(high), math.log(found)
        return 0.5 if high <= low else min(1.0, max(0.0, (found - low) / (high - low)))

    def ticks(self) -> list[tuple[float, str]]:
        if self.values:
            every = -(-len(self.values) // _MAX_TICKS)
            return [((index + 0.5) / len(self.values), _label(one)) for index, one in enumerate(self.values) if index % every == 0]
        parts = (0.0, 0.25, 0.5, 0.75, 1.0) if self.high > self.low else (0.5,)
        return [(part, _label(self._at(part))) for part in parts]

    def _at(self, part: float) -> float:
        if self.log:
            return math.exp(math.log(self.low) + part * (math.log(self.high) - math.log(self.low)))
        return self.low + part * (self.high - self.low)


@dataclass(frozen=True)
class Record:
    values: Mapping[str, Any]  # by the names of the axes. Where a value is missing, the line has a gap.
    words: str
    rank: Rank = "other"


def draw_parallel(title: str, coordinates: Sequence[Coordinate], records: Sequence[Record]) -> Markup:
    if not coordinates or not records:
        return Markup()
    width = max(_MIN_WIDTH, 2 * _SIDE + _AXIS_WIDTH * (len(coordinates) - 1))
    plot = Plot(width=width, height=_HEIGHT, left=_SIDE, right=_SIDE, top=_TOP, bottom=_BOTTOM)
    order: dict[Rank, int] = {"other": 0, "good": 1, "best": 2}
    xs = [plot.x(index / max(1, len(coordinates) - 1)) for index in range(len(coordinates))]
    return draw_template(
        "parallel_lines.jinja",
        plot,
        title=title,
        axes=[
            (x, _shortened(one.name), [(plot.y(place), label) for place, label in one.ticks()])
            for x, one in zip(xs, coordinates, strict=True)
        ],
        lines=[
            (_path(plot, xs, coordinates, record), record.rank, record.words)
            for record in sorted(records, key=lambda record: order[record.rank])
        ],
    )


def _path(plot: Plot, xs: Sequence[float], coordinates: Sequence[Coordinate], record: Record) -> str:
    points, before = [], False
    for x, one in zip(xs, coordinates, strict=True):
        place = one.place(record.values.get(one.name))
        if place is not None:
            points.append(f"{'L' if before else 'M'}{x:.1f} {plot.y(place):.1f}")
        before = place is not None
    return "".join(points)


def _label(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "none" if value is None else str(value).lower()
    return f"{value:.3g}" if isinstance(value, float) else _shortened(str(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"
