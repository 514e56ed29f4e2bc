"""The files of heartbeats and stacks in a run, the content of a heartbeat, and the timeouts until the next one.

No file is opened through a link.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from trainer.watchdog.processes import ProcessId, own_container

MAX_BEAT_BYTES = 4096
Phase = Literal["loading", "data", "forward", "reduce", "report", "evaluate", "save", "done"]
"""What a rank is doing, in the order of a step. `reduce` begins with the last backward pass, where ranks wait for each other."""
PHASES: tuple[Phase, ...] = get_args(Phase)
_SLOW_PHASES = ("loading", "evaluate", "save")
_FIRST_STEPS = 3
_LEAST_STALL_S = 30.0
_SLOWER = 3.0
_UNKNOWN = "-"
_RECENT_STEPS = 50


def remove_heartbeats(run: Path, ranks: Iterable[int] | None = None) -> None:
    """Remove the heartbeats of ranks that have ended, so that other nodes do not wait for them; None: all, before a rank writes."""
    with opened_folder(run / "heartbeat") as folder:
        found = os.listdir(folder) if ranks is None else [heartbeat_file(run, rank).name for rank in ranks]  # noqa: PTH208 - open
        for name in found:
            with suppress(FileNotFoundError):
                if name.startswith("rank-"):
                    os.unlink(name, dir_fd=folder)


def heartbeat_file(run: Path, rank: int) -> Path:
    return run / "heartbeat" / f"rank-{rank}"


def stacks_file(run: Path, rank: int) -> Path:
    return run / "stacks" / f"rank-{rank}.txt"


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor. It is created if it is missing; a link to a folder is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        raise _in_the_way(path, "directory") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_to_append(path: Path) -> int:
    """Open a regular file for appending and return its descriptor. It is created if it is missing; links are refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with opened_folder(path.parent) as folder:
        try:
            descriptor = os.open(path.name, flags, 0o644, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _in_the_way(path, "regular file") from None
            raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _in_the_way(path, "regular file with one name")
    return descriptor


def read_beat(path: Path) -> bytes:
    """Return the first 4096 bytes of a file. Links are refused; this never waits for the other end of a pipe."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        return os.read(descriptor, MAX_BEAT_BYTES)
    finally:
        os.close(descriptor)


def _in_the_way(path: Path, wanted: str) -> OSError:
    return OSError(f"{path} is not a {wanted} (links are not allowed); remove it and run the same command again")


@dataclass(frozen=True)
class Timeouts:
    stall_s: float | None  # limit in the phases of a step. None: the greater of 30 s and three times the slowest of 50 steps
    slow_s: float  # limit in slow phases, the first three steps and those after a new shape, in which code is compiled

    def limit_s(self, phase: Phase, step_seconds: Collection[float]) -> float:
        """Return the seconds of silence that are allowed in a phase, after steps of these durations; infinite in `done`."""
        if phase == "done":
            return math.inf
        stall_s = self.stall_s or max(_LEAST_STALL_S, _SLOWER * max(step_seconds, default=0.0))
        return max(self.slow_s, stall_s) if phase in _SLOW_PHASES or len(step_seconds) < _FIRST_STEPS else stall_s


@dataclass(frozen=True)
class Heartbeat:
    """One heartbeat in the file of a rank: a line of fixed length, so that the next one replaces it in place."""

    number: int
    pid: int
    started: int  # start time of the process in the kernel's ticks. With the pid it identifies one process.
    step: int
    phase: Phase
    limit_s: float  # seconds within which the next beat is expected
    lap: int = 0  # how often the run has gone back to an earlier step
    container: str = ""  # the container in which the pid is valid; see `own_container`

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)

    @property
    def place(self) -> tuple[int, int, int]:
        """The progress of the rank. All other ranks wait for the rank with the lowest place."""
        return self.lap, self.step, PHASES.index(self.phase)

    def to_bytes(self) -> bytes:
        return (
            f"beat {self.number:>12} pid {self.pid:>10} started {self.started:>20} container {self.container or _UNKNOWN:<47} "
            f"lap {self.lap:>6} step {self.step:>12} limit_s {self.limit_s:>12.1f} phase {self.phase:<10}\n"
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Heartbeat | None:
        """Parse a line; return None if it is not a beat, for example because it is just being written."""
        words = data.decode(errors="replace").split()
        values = dict(zip(words[::2], words[1::2], strict=False))
        try:
            number, pid, started, step, lap = (int(values[name]) for name in ("beat", "pid", "started", "step", "lap"))
            phase = PHASES[PHASES.index(values["phase"])]
            limit_s = float(values["limit_s"])
            container = values["container"].removeprefix(_UNKNOWN)
            return None if math.isnan(limit_s) else cls(number, pid, started, step, phase, limit_s, lap, container)
        except (KeyError, ValueError):
            return None


class HeartbeatWriter:
    """The heartbeat of this rank, for the watchdog and the container's health check. A beat takes a few microseconds."""

    def __init__(self, path: Path, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        with opened_folder(path.parent) as folder:
            with suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            self._file = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        self._timeouts = timeouts
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
        limit_s = self._timeouts.limit_s(self._phase, self._step_seconds)
        pid, started = self._process.pid, self._process.started
        beat = Heartbeat(self._number, pid, started, self._step, self._phase, limit_s, self._lap, self._container)
        os.pwrite(self._file, beat.to_bytes(), 0)

    def expect_slow_steps(self) -> None:
        # code may be compiled again
        self._step_seconds.clear()

    def close(self) -> None:
        self.at("done")
        os.close(self._file)
