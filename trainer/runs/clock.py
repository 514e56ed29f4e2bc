from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

UNTIMED_STEPS = 3  # the first steps of a process compile code, so their times say little about later steps
_NUM_RECENT = 10
_FIRST_STEPS = 5


class Clock:
    """Wall-clock seconds of a run over all resumes, from the moment at which this object is made."""

    def __init__(self) -> None:
        self._zero = self._last_lap = time.monotonic()
        self._least_ending_s = 0.0
        self._num_laps = 0
        self._laps_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._pauses_s: deque[float] = deque(maxlen=_NUM_RECENT)

    def resume(self, seconds: float, ending_s: float = 0.0) -> None:
        """Begin the first lap after earlier starts of the run: add their seconds. `ending_s` is then at least the given value."""
        self._zero -= seconds
        self._last_lap = time.monotonic()
        self._least_ending_s = ending_s

    @property
    def seconds(self) -> float:
        # without the time between two starts
        return time.monotonic() - self._zero

    @property
    def ending_s(self) -> float:
        """Seconds from the start of a step to the end of the run: two median steps, and the longest recent evaluation or save."""
        steps_s = 2 * median(self._laps_s) if self._laps_s else 0.0
        return max(self._least_ending_s, steps_s + max(self._pauses_s, default=0.0))

    def lap(self) -> float:
        now = time.monotonic()
        lap, self._last_lap = now - self._last_lap, now
        self._num_laps += 1
        if self._num_laps > UNTIMED_STEPS:
            self._laps_s.append(lap)
        return lap

    def first_steps_s(self) -> float | None:
        """Return the median seconds of the first five timed steps, after the last of them; None at any other time."""
        return median(self._laps_s) if self._num_laps == UNTIMED_STEPS + _FIRST_STEPS else None

    @contextmanager
    def paused(self) -> Iterator[None]:
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
