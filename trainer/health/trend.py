"""Whether a series of measurements rises, and how fast, without being misled by outliers or noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Trend", "trend"]


@dataclass(frozen=True)
class Trend:
    """What a series does as a whole."""

    slope: float
    """Units of y for one of x: the median of the slopes between all pairs of points (Theil, 1950; Sen, 1968)."""
    score: float
    """How far the pairs that rise outnumber those that fall, in standard deviations of a series without a trend (Mann, 1945;
    Kendall, 1975)."""

    def growth(self, distance: float) -> float:
        """What the slope comes to over a distance in x."""
        return self.slope * distance


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """The trend of y over x; pairs of equal x count nothing. Fewer than two different x have none.

    The score is `S / sqrt(n (n - 1) (2 n + 5) / 18)`, with S the rising pairs less the falling ones of n points. The slope stands
    where up to 29 % of the points are arbitrary.
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first, second = np.triu_indices(len(x_N), 1)
    run = x_N[second] - x_N[first]
    rise = (y_N[second] - y_N[first])[run != 0]
    run = run[run != 0]
    if not len(run):
        return Trend(0.0, 0.0)
    count = len(x_N)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return Trend(float(np.median(rise / run)), float(np.sign(rise * run).sum()) / deviation)
