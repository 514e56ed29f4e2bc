"""The data of a chart before it is drawn: curves as numbers, lines, axes and their labels.

N points of a curve   C columns of a picture
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

WIDE = 10.0  # in reports, the default of `Chart.log_from`
_LARGEST = 1e280  # larger values are drawn at the edge, so no difference of two values overflows
MAX_COLUMNS = 500  # this limits the size of a page for a run of any length

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values over increasing places, such as a loss over steps. It keeps values that are nan or infinite."""

    x_N: Floats
    y_N: Floats

    @staticmethod
    def of(points: Iterable[tuple[float, float]]) -> Curve:
        both = np.array(list(points), np.float64).reshape(-1, 2)
        return Curve(both[:, 0], both[:, 1])

    @property
    def finite(self) -> Floats:
        return self.y_N[np.isfinite(self.y_N)]

    @property
    def last(self) -> float | None:
        return float(self.y_N[-1]) if len(self.y_N) else None

    def __len__(self) -> int:
        return len(self.x_N)


@dataclass(frozen=True)
class Thinned:
    """A curve in columns. If it has at most as many points as columns, each column is one point."""

    x_C: Floats
    mean_C: Floats  # mean of the finite values of a column; nan if it has none
    low_C: Floats
    high_C: Floats
    bad_C: NDArray[np.int64]
    whole: bool


def thin(curve: Curve, max_columns: int = MAX_COLUMNS) -> Thinned:
    """Cut a curve into columns of neighbouring points, with mean, lowest and highest of each: no peak is lost."""
    num_points = len(curve)
    num_columns = min(num_points, max_columns)
    if num_columns == 0:
        none = np.empty(0)
        return Thinned(none, none, none, none, np.empty(0, np.int64), whole=True)
    starts_C = np.arange(num_columns) * num_points // num_columns
    sizes_C = np.diff(starts_C, append=num_points)
    finite_N = np.isfinite(curve.y_N)
    good_C = np.add.reduceat(finite_N.astype(np.int64), starts_C)
    divisors_N = np.repeat(np.maximum(good_C, 1), sizes_C)  # divided before they are added, as their sum could overflow
    mean_C = np.add.reduceat(np.where(finite_N, curve.y_N, 0.0) / divisors_N, starts_C)
    low_C = np.minimum.reduceat(np.where(finite_N, curve.y_N, np.inf), starts_C)
    high_C = np.maximum.reduceat(np.where(finite_N, curve.y_N, -np.inf), starts_C)
    some_C = good_C > 0
    return Thinned(
        x_C=np.add.reduceat(curve.x_N / np.repeat(sizes_C, sizes_C), starts_C),
        mean_C=np.where(some_C, np.clip(mean_C, low_C, high_C), np.nan),  # rounding could move the mean out of the range by one bit
        low_C=np.where(some_C, low_C, np.nan),
        high_C=np.where(some_C, high_C, np.nan),
        bad_C=sizes_C - good_C,
        whole=num_columns == num_points,
    )


def average_window(num_points: int) -> int:
    """A twentieth of all, at least 1 (no averaging) and at most 100."""
    return max(1, min(100, num_points // 20))


def moving_average(curve: Curve, window: int) -> Curve:
    """Return the mean of the finite values among the last `window` points; nan if there are none."""
    if window <= 1 or not len(curve):
        return curve
    finite_N = np.isfinite(curve.y_N)
    ones = np.ones(min(window, len(curve)))
    # Not differences of one cumulative sum: a single huge loss would cost the precision of all later values.
    with np.errstate(over="ignore"):
        sums_N = np.convolve(np.where(finite_N, curve.y_N, 0.0), ones)[: len(curve)]
    counts_N = np.convolve(finite_N.astype(np.float64), ones)[: len(curve)].round()
    return Curve(curve.x_N, np.divide(sums_N, counts_N, out=np.full(len(curve), np.nan), where=counts_N > 0))


def median(values: Floats) -> float | None:
    """Return the median of the finite values; None if there are none."""
    finite = values[np.isfinite(values)]
    found = float(np.median(finite)) if len(finite) else math.nan
    return found if math.isfinite(found) else None


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

    def places(self, values: Floats) -> Floats:
        """Return places from 0 (lowest value) to 1 (highest); nan for nan, infinities and, in logarithms, up to zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high, found = (np.log(np.array(value)) if self.log else value for value in (self.low, self.high, values))
            places: Floats = (np.asarray(found) - low) / (np.asarray(high) - low)
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


def axis_through(values: Sequence[Floats], *, log_from: float | None = None, margin: float = 0.0, whole: bool = False) -> Axis:
    """Return an axis through all finite values. `margin` is a share of the range; with `whole` only integers have a label."""
    finite = [np.clip(one[np.isfinite(one)], -_LARGEST, _LARGEST) for one in values]
    low = min((float(one.min()) for one in finite if len(one)), default=0.0)
    high = max((float(one.max()) for one in finite if len(one)), default=1.0)
    if log_from is not None and low > 0 and high / log_from > low:
        free = 10 ** (margin * (math.log10(high) - math.log10(low)))
        return _log_axis(max(low / free, math.ulp(0.0)), min(high * free, sys.float_info.max))  # without zero and infinity
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
