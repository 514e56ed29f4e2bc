"""How far the last losses of a run were above their expected level: the upper tail of a run's own noise.

The guard measures the noise in a window of losses. That noise is too small if losses are correlated over more than the window, or
if large values are more frequent than in normal noise. Both show in the past excesses: in their spread (the upper quartile), and in
the mean of the largest ones compared with that of as many normal draws.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from trainer.runs.state import ExcessRows

_KEPT = 1024
_BLOCK = 16  # steps between two estimates of the tail
_NEWER = 2  # steps that may be known before the estimate may use them
_LEAST, _LEAST_NOISES = 16, 256
_LARGEST = 4
_NORMAL = NormalDist()
_UPPER_QUARTILE = _NORMAL.inv_cdf(0.75)
_TOLERANCE, _EXPONENT = 1.05, 3.0
"""The largest excesses of normal noise exceed their expected mean by up to 5 %. The limit grows with the third power of what is
beyond that: by simulation, the least power with which log-normal noise (sigma 1) has about one false alarm in 20,000 steps."""
_MOST = 1e6


@dataclass(frozen=True)
class Tail:
    spread: float = 1.0
    """Factor on the unit by which the excesses are spread more widely than normal noise of this unit; at least 1."""
    heaviness: float = 1.0  # further factor on the limit for tails that are heavier than those of normal noise; at least 1
    largest: float = 0.0  # mean of the largest excesses, in units
    largest_of_normal: float = math.inf  # the same mean for as many draws of normal noise, in its standard deviations
    climb: float = 0.0  # standard deviation of the newest level above the level of the window, in units
    noise: float = 0.0  # median of the noise that was measured in these steps, in nats; 0 if they are few
    num: int = 0


class Excesses:
    def __init__(self, rows: ExcessRows | None = None) -> None:
        self._rows: deque[tuple[int, float, float, float]] = deque(maxlen=_KEPT + _BLOCK + _NEWER)
        if rows is not None:
            self._rows.extend(zip(rows.steps, rows.excesses, rows.climbs, rows.noises, strict=True))
        self._tails: dict[int, Tail] = {}

    def add(self, step: int, excess: float, climb: float, noise: float) -> None:
        self._rows.append((step, _rounded(excess), _rounded(climb), _rounded(noise)))

    def tail(self, known: int) -> Tail:
        """Return the tail of the steps up to the last multiple of 16 that is not above `known`."""
        block = known // _BLOCK * _BLOCK
        if block not in self._tails:
            self._tails = {at: tail for at, tail in self._tails.items() if at == block - _BLOCK}
            self._tails[block] = _tail([row[1:] for row in self._rows if row[0] <= block][-_KEPT:])
        return self._tails[block]

    @property
    def rows(self) -> ExcessRows:
        return ExcessRows(
            steps=[row[0] for row in self._rows],
            excesses=[row[1] for row in self._rows],
            climbs=[row[2] for row in self._rows],
            noises=[row[3] for row in self._rows],
        )


def _tail(rows: Sequence[tuple[float, float, float]]) -> Tail:
    num = len(rows)
    if num < _LEAST:
        return Tail(num=num)
    excesses, climbs, noises = map(sorted, zip(*rows, strict=True))
    quartile = 3 * num // 4
    spread = max(1.0, excesses[quartile] / _UPPER_QUARTILE)
    part = _LARGEST / num
    of_normal = _NORMAL.pdf(_NORMAL.inv_cdf(1 - part)) / part
    largest = fmean(excesses[-_LARGEST:])
    heaviness = max(1.0, largest / of_normal / spread / _TOLERANCE) ** _EXPONENT
    usual = noises[num // 2] if num >= _LEAST_NOISES else 0.0
    return Tail(spread, heaviness, largest, of_normal, max(0.0, climbs[quartile] / _UPPER_QUARTILE), usual, num)


def _rounded(value: float) -> float:
    return float(f"{max(-_MOST, min(_MOST, value)):.3g}") if not math.isnan(value) else 0.0
