"""The data of a chart before it is drawn: its lines, its axes, and the labels of the axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from common.html.curves import Curve, Thinned, thin

WIDE = 10.0  # in reports, the default of `Chart.log_from`
_LARGEST = 1e280  # larger values are drawn at the edge, so no difference of two values overflows


@dataclass(frozen=True)
class Line:
    name: str
    curve: Curve
    look: int = 0
    faint: bool = False  # the line is only a background for another one
    points: bool = False  # each value has a marker, unless there are many values

    @cached_property
    def thinned(self) -> Thinned:
        return thin(self.curve)


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def places(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return places from 0 (lowest value) to 1 (highest); nan for nan, infinities and, in logarithms, up to zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high, found = (np.log(np.array(value)) if self.log else value for value in (self.low, self.high, values))
            places: NDArray[np.float64] = (np.asarray(found) - low) / (np.asarray(high) - low)
        return np.where(np.isfinite(places), np.clip(places, 0, 1), np.nan)


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str  # or another description of the values
    lines: tuple[Line, ...]
    along: str = "step"
    log_from: float | None = None
    """The vertical axis is logarithmic if all values are above zero and the highest is more than this many times the lowest."""
    from_zero: bool = False

    @property
    def shown(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if len(line.curve))

    @cached_property
    def x(self) -> Axis:
        """It begins at zero, so that charts below each other have the same scale."""
        return axis_through([np.zeros(1), *(line.curve.x_N for line in self.shown)], whole=True)

    @cached_property
    def y(self) -> Axis:
        found = [bound for line in self.shown for bound in (line.thinned.low_C, line.thinned.high_C)]
        return axis_through([*found, np.zeros(1)] if self.from_zero else found, log_from=self.log_from, margin=0.05)


def axis_through(
    values: Sequence[NDArray[np.float64]], *, log_from: float | None = None, margin: float = 0.0, whole: bool = False
) -> Axis:
    """Return an axis through all finite values. `margin` is a share of the range; with `whole` only integers have a label."""
    finite = [np.clip(one[np.isfinite(one)], -_LARGEST, _LARGEST) for one in values]
    low = min((float(one.min()) for one in finite if len(one)), default=0.0)
    high = max((float(one.max()) for one in finite if len(one)), default=1.0)
    if log_from is not None and low > 0 and high / log_from > low:
        free = 10 ** (margin * (math.log10(high) - math.log10(low)))
        return _log_axis(max(low / free, math.ulp(0.0)), high * free)  # the quotient may round to zero
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-280):
        pad = max(abs(high), abs(low)) / 2 or 0.5
        return _linear_axis(low - pad, high + pad, whole=whole)
    free = margin * (high - low)
    return _linear_axis(low if low == 0 else low - free, high + free, whole=whole)


def _linear_axis(low: float, high: float, *, whole: bool) -> Axis:
    """Three to six round numbers, or fewer if they must be integers."""
    size = max(10.0 ** math.floor(math.log10((high - low) / 5)), 1.0 if whole else 0.0)
    factors = (1, 2, 5, 10, 20) if whole else (1, 2, 2.5, 5, 10, 20)
    step = next(size * factor for factor in factors if high - low <= 5 * size * factor)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(number * step for number in range(first, last + 1)))


def _log_axis(low: float, high: float) -> Axis:
    """At most six labels at powers of ten. With fewer than three, twice and five times these are labels too."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    powers = [10.0**power for power in range(first, last + 1)]
    if len(powers) < 3:
        between = [10.0**power * factor for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        powers = [value for value in between if low <= value <= high]
    return Axis(low, high, tuple(powers[:: -(-len(powers) // 6)] if powers else ()), log=True)


def measured(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.5g}"


def short(value: float) -> str:
    """For example `0.25`, `1.5k`, `20M`, `1e-05`."""
    for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1000 * unit and (abs(value) >= 1e4 or value % 1000 == 0):
            return f"{value / unit:.4g}{sign}"
    return f"{value:.4g}"
