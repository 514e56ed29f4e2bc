"""The time of a run, and the times of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Clock"]

_NUM_PAUSES = 10


class Clock:
    """Wall-clock seconds of a run over all resumes, from the moment at which this object is made."""

    def __init__(self) -> None:
        self._zero = self._last_lap = time.monotonic()
        self._pauses_s: deque[float] = deque(maxlen=_NUM_PAUSES)

    def resume(self, seconds: float) -> None:
        """Add the time of earlier starts of the run, and begin the first lap."""
        self._zero -= seconds
        self._last_lap = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the run began, in seconds. The time between two starts does not count."""
        return time.monotonic() - self._zero

    @property
    def ending_s(self) -> float:
        """Seconds that evaluation and save at the end may take: the longest of the last few; 0 before the first."""
        return max(self._pauses_s, default=0.0)

    def lap(self) -> float:
        """Return the seconds since the last call, without pauses."""
        now = time.monotonic()
        lap, self._last_lap = now - self._last_lap, now
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time that this context takes as time of a step."""
        begin = time.monotonic()
        yield
        self._last_lap += time.monotonic() - begin

    @contextmanager
    def evaluating_and_saving(self) -> Iterator[None]:
        """Pause as `paused` does, and note how long it takes, because a run ends with the same work."""
        begin = time.monotonic()
        with self.paused():
            yield
        self._pauses_s.append(time.monotonic() - begin)
