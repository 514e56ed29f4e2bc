from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trend:
    slope: float  # units of y for one of x: the median of the slopes between all pairs of points (Theil, 1950; Sen, 1968)
    score: float
    """Number of rising pairs less number of falling pairs, in standard deviations of a series without a trend (Mann, 1945;
    Kendall, 1975)."""

    def growth(self, distance: float) -> float:
        return self.slope * distance


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """Return the trend of y over x. Pairs of equal x are left out; with fewer than two different x the trend is zero.

    The score is `S / sqrt(n (n - 1) (2 n + 5) / 18)`, where S is the number of rising pairs less that of falling pairs among n
    points. The slope tolerates up to 29 % of arbitrary points.
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
