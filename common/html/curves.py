"""Curves as numbers: moving averages, and the reduction of many points to few columns.

N points of a curve   C columns of a picture
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
