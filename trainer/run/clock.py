"""The training time of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Clock"]


class Clock:
    """Seconds of training over all resumes. Evaluations, saves and rollbacks do not count."""

    def __init__(self, seconds: float) -> None:
        self._zero = time.monotonic() - seconds
        self._last_lap = seconds

    @property
    def seconds(self) -> float:
        """Training time since the run began."""
        return time.monotonic() - self._zero

    def lap(self) -> float:
        """Return the seconds of training since the last call."""
        now = self.seconds
        lap, self._last_lap = now - self._last_lap, now
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time that this context takes."""
        begin = time.monotonic()
        yield
        self._zero += time.monotonic() - begin
