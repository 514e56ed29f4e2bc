"""One heartbeat, and the time limit for the next."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from trainer.watchdog.processes import ProcessId

__all__ = ["PHASES", "Beat", "Patience", "Phase"]

Phase = Literal["loading", "data", "forward", "reduce", "report", "evaluate", "save", "done"]
"""What a rank is doing, in the order of a step. `reduce` begins with the last backward pass, where ranks wait for each other."""
PHASES: tuple[Phase, ...] = get_args(Phase)
_SLOW_PHASES = ("loading", "evaluate", "save")
_FIRST_STEPS = 3
_LEAST_STALL_S = 30.0
_SLOWER = 3.0
_UNKNOWN = "-"


@dataclass(frozen=True)
class Patience:
    """How long a rank may be silent."""

    stall_s: float | None
    """Limit in the phases of a step; None: the greater of 30 s and three times the slowest of the last 50 steps."""
    slow_s: float
    """Limit in the slow phases, and in the first three steps and those after a new shape of the data, in which code is compiled."""

    def limit_s(self, phase: Phase, step_seconds: Collection[float]) -> float:
        """Return the seconds of silence that are allowed in a phase, after steps of these durations; infinite in `done`."""
        if phase == "done":
            return math.inf
        stall_s = self.stall_s or max(_LEAST_STALL_S, _SLOWER * max(step_seconds, default=0.0))
        return max(self.slow_s, stall_s) if phase in _SLOW_PHASES or len(step_seconds) < _FIRST_STEPS else stall_s


@dataclass(frozen=True)
class Beat:
    """One heartbeat in the file of a rank: a line of fixed length, so that the next one replaces it in place."""

    number: int
    pid: int
    started: int
    """Start time of the process in the kernel's ticks. With the pid it identifies one process."""
    step: int
    phase: Phase
    limit_s: float
    """Seconds within which the next beat is expected."""
    lap: int = 0
    """How often the run has gone back to an earlier step."""
    container: str = ""
    """The container in which the pid is valid; see `own_container`."""

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
    def from_bytes(cls, data: bytes) -> Beat | None:
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
