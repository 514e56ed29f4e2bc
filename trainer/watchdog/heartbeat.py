"""Writes the heartbeat of a rank."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.watchdog.beat import Beat, Patience, Phase
from trainer.watchdog.files import own_folder
from trainer.watchdog.processes import ProcessId, own_container

__all__ = ["Heartbeat"]

_RECENT_STEPS = 50


class Heartbeat:
    """The heartbeat of this rank, for the watchdog and the container's health check. A beat takes a few microseconds."""

    def __init__(self, path: Path, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        with own_folder(path.parent) as folder:
            with suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            self._file = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        self._patience = patience
        self._clock = clock
        self._process, self._container = ProcessId.own(), own_container()
        self._number = 0
        self._phase: Phase = "loading"
        self._step = 0
        self._lap = 0
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._shapes: set[Hashable] = set()
        self.beat()

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Enter a phase. `step` is the number of the step that begins with it, if one does; it decreases if the run goes back."""
        if step is not None and step != self._step:
            self._lap += step < self._step
            now = self._clock()
            if self._step_began is not None:
                self._step_seconds.append(now - self._step_began)
            self._step, self._step_began = step, now
        self._phase = phase
        self.beat()

    def at_forward(self, shapes: Set[Hashable]) -> None:
        """Enter the phase `forward`. If a shape of the step's tensors is new, this step and the next two may be slow."""
        if not shapes <= self._shapes:
            self._shapes |= shapes
            self.expect_slow_steps()
        self.at("forward")

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Enter a phase within the context, and then return to the one before. The time in between does not count for the step."""
        before, step_began, entered = self._phase, self._step_began, self._clock()
        self.at(phase)
        yield
        if step_began is not None:
            self._step_began = step_began + self._clock() - entered
        self.at(before)

    def beat(self) -> None:
        self._number += 1
        limit_s = self._patience.limit_s(self._phase, self._step_seconds)
        pid, started = self._process.pid, self._process.started
        beat = Beat(self._number, pid, started, self._step, self._phase, limit_s, self._lap, self._container)
        os.pwrite(self._file, beat.to_bytes(), 0)

    def expect_slow_steps(self) -> None:
        """Give this step and the next two the limit of the first steps, because code may be compiled again."""
        self._step_seconds.clear()

    def close(self) -> None:
        self.at("done")
        os.close(self._file)
