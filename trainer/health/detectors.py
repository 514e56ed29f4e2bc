"""Detectors of trouble in the numbers of a run."""

from __future__ import annotations

from collections import deque
from statistics import median

from trainer.health.trend import trend

__all__ = ["RECOVERED", "Episode", "MemoryTrend", "SpeedDrop", "WaitShare"]

_RECENT_RATES = 10
_REFERENCE_RATES = 200
RECOVERED = 0.8
"""Share of a limit, or of the way to it, at which a trouble counts as over; between that and the limit nothing changes."""
_WARM_UP_READINGS, _MEMORY_READINGS, _LEAST_MEMORY_READINGS = 6, 60, 30
_LEAST_SCORE = 6.0
_LEAST_GROWTH_MIB = 64.0


class Episode:
    """Turns a state that is good or bad at each moment into one signal for each time that it goes bad.

    Args:
        onset: bad moments in a row that begin an episode.
        recovery: good moments in a row that end it.
    """

    def __init__(self, onset: int = 1, recovery: int = 1) -> None:
        self._onset, self._recovery = onset, recovery
        self._bad = self._good = 0
        self.lasts = False
        """Whether an episode has begun and not ended."""

    def begins(self, *, bad: bool) -> bool:
        """Takes the next moment; true at the one at which an episode begins."""
        self._bad, self._good = (self._bad + 1, 0) if bad else (0, self._good + 1)
        if self.lasts:
            self.lasts = self._good < self._recovery
            return False
        self.lasts = self._bad >= self._onset
        return self.lasts


class WaitShare:
    """The share of the time that steps waited for data, over a window; an episode begins above `limit` and ends below 0.8 of it."""

    def __init__(self, window: int, limit: float) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._limit = limit
        self._episode = Episode()

    def observe(self, seconds: float, waited_s: float) -> float | None:
        """Takes a step's duration and how long it waited; the share where an episode begins with it, else None."""
        self._steps.append((seconds, waited_s))
        if len(self._steps) < (self._steps.maxlen or 0):
            return None
        share = sum(waited for _, waited in self._steps) / max(1e-9, sum(duration for duration, _ in self._steps))
        limit = self._limit * (RECOVERED if self._episode.lasts else 1)
        return share if self._episode.begins(bad=share > limit) else None


class SpeedDrop:
    """Falls of the speed: the median of the last 10 steps against that of up to 200 before the window.

    The reference stands still while an episode lasts, so a run that stays slow is told once.

    Args:
        window: steps that must have been measured before the last 10 are held against them.
        drop: share by which the speed must fall.
    """

    def __init__(self, window: int, drop: float) -> None:
        self._window, self._drop = window, drop
        self._recent: deque[float] = deque(maxlen=_RECENT_RATES)
        self._reference: deque[float] = deque(maxlen=max(window, _REFERENCE_RATES))
        self._episode = Episode()

    def observe(self, rate: float) -> tuple[float, float] | None:
        """Takes the rate of a step; the present and the usual rate where an episode begins with it, else None."""
        if len(self._recent) == _RECENT_RATES and not self._episode.lasts:
            self._reference.append(self._recent[0])
        self._recent.append(rate)
        if len(self._reference) < self._window:
            return None
        now, usual = median(self._recent), median(self._reference)
        fallen = now < usual * (1 - self._drop * (RECOVERED if self._episode.lasts else 1))
        return (now, usual) if self._episode.begins(bad=fallen) else None


class MemoryTrend:
    """Growth of the run's private memory on the host, from the trend of its last 60 readings.

    It counts as a leak where it is faster than the limit, where most pairs of readings rise (a score of 6 standard deviations:
    noise without a trend reaches that once in 10^9), and where it has come to 64 MiB. The first six readings are left out: a run
    takes memory when it begins.
    """

    def __init__(self, limit_mb: float) -> None:
        self._limit = limit_mb
        self._seen = 0
        self._readings: deque[tuple[float, float]] = deque(maxlen=_MEMORY_READINGS)
        self._episode = Episode(recovery=_WARM_UP_READINGS)
        self.mb_per_1000_steps: float | None = None
        """The trend itself; None while there are too few readings."""

    def observe(self, step: int, private_mib: float) -> float | None:
        """Takes a reading; the growth in MB per 1,000 steps where an episode begins with it, else None."""
        self._seen += 1
        if self._seen <= _WARM_UP_READINGS:
            return None
        if self._readings and step < self._readings[-1][0]:  # after a rollback, pairs across it would seem to fall
            self._readings.clear()
            self.mb_per_1000_steps = None
        self._readings.append((step, private_mib))
        if len(self._readings) < _LEAST_MEMORY_READINGS:
            return None
        steps, mib = zip(*self._readings, strict=True)
        found = trend(steps, mib)
        self.mb_per_1000_steps = found.slope * 1000 * 2**20 / 1e6
        leaks = (
            self.mb_per_1000_steps > self._limit
            and found.score > _LEAST_SCORE
            and found.growth(steps[-1] - steps[0]) > _LEAST_GROWTH_MIB
        )
        return self.mb_per_1000_steps if self._episode.begins(bad=leaks) else None
