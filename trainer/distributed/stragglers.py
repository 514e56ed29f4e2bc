"""Finds a rank that is slower than the others, by the time that each rank works before it waits for the others.

The last exchange of a step ends at the same moment on all ranks. The own time of a rank is the time from there to its first
exchange of the next step. The duration of a step does not help, because it is the same on all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

WINDOW_STEPS = 15
_SLOW_STEPS = 11  # steps of the window in which a slow rank must have been slow. A few long pauses do not make a rank slow.
_STEP_FACTOR = 1.5
_FACTOR = 2.0
_LEAST_EXCESS_S = 0.01
_LEAST_SHARE = 0.1
_SILENT_STEPS = 1000


@dataclass(frozen=True)
class OwnTime:
    seconds: float
    data_s: float  # the part of `seconds` in which the rank waited for its own data


@dataclass(frozen=True)
class SlowRank:
    rank: int
    factor: float  # own time of the rank, divided by the median of the other ranks
    phase: Literal["data", "compute"]  # the phase that causes most of the difference
    seconds: float  # own time of the rank in one step, median over the window
    others_s: float  # own time of the other ranks in one step, median over ranks and window

    def describe(self) -> str:
        advice = (
            "check its storage, or increase prefetch"
            if self.phase == "data"
            else "check the clock rate and temperature of its device, and other processes on its machine"
        )
        return (
            f"rank {self.rank} is slow: it works {self.seconds * 1000:.0f} ms in each step, and the other ranks "
            f"{self.others_s * 1000:.0f} ms ({self.factor:.1f} times), most of the difference in {self.phase}; "
            f"all ranks wait for it. Training continues; {advice}"
        )


def slow_rank(own_SR: NDArray[np.float64], data_SR: NDArray[np.float64], step_s: float) -> SlowRank | None:
    """Return the slowest rank if it is slow, else None; S steps, R ranks.

    A rank is slow if its median own time is at least twice that of the other ranks, if it took at least 1.5 times their median in
    11 of 15 steps, and if the difference is at least 10 ms and a tenth of a step.
    """
    num_steps, num_ranks = own_SR.shape
    if num_ranks < 2:
        return None
    own_R = np.median(own_SR, axis=0)
    rank = int(np.argmax(own_R))
    others = np.arange(num_ranks) != rank
    seconds, others_s = float(own_R[rank]), float(np.median(own_R[others]))
    slow_S = own_SR[:, rank] >= _STEP_FACTOR * np.median(own_SR[:, others], axis=1)
    excess_s = seconds - others_s
    if (
        seconds < _FACTOR * others_s
        or excess_s < max(_LEAST_EXCESS_S, _LEAST_SHARE * step_s)
        or slow_S.sum() * WINDOW_STEPS < _SLOW_STEPS * num_steps
    ):
        return None
    data_R = np.median(data_SR, axis=0)
    data_excess_s = float(data_R[rank] - np.median(data_R[others]))
    return SlowRank(
        rank=rank,
        factor=seconds / max(others_s, 1e-9),
        phase="data" if data_excess_s > excess_s / 2 else "compute",
        seconds=seconds,
        others_s=others_s,
    )


class StragglerDetector:
    """Reports a slow rank once, and again if another rank is slow or after 1,000 steps."""

    def __init__(self) -> None:
        self._times: deque[tuple[Sequence[OwnTime], float]] = deque(maxlen=WINDOW_STEPS)
        self._uneven: deque[bool] = deque(maxlen=WINDOW_STEPS)
        """Whether any rank was slow in the step. With too few such steps `slow_rank` need not run."""
        self._reported: tuple[int, int] | None = None  # the rank that was reported last, and the steps since then

    def observe(self, times_by_rank: Sequence[OwnTime], step_s: float) -> SlowRank | None:
        *others, slowest = sorted(times.seconds for times in times_by_rank)
        self._times.append((times_by_rank, step_s))
        self._uneven.append(bool(others) and slowest >= _STEP_FACTOR * others[(len(others) - 1) // 2])
        if self._reported is not None:
            rank, steps = self._reported
            self._reported = (rank, steps + 1) if steps < _SILENT_STEPS else None
        if len(self._times) < WINDOW_STEPS or sum(self._uneven) < _SLOW_STEPS:
            return None
        own_SR = np.array([[time.seconds for time in times] for times, _ in self._times])
        data_SR = np.array([[time.data_s for time in times] for times, _ in self._times])
        found = slow_rank(own_SR, data_SR, float(np.median([duration for _, duration in self._times])))
        if found is None or (self._reported is not None and self._reported[0] == found.rank):
            return None
        self._reported = (found.rank, 0)
        return found


class HostMark:
    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def reached(self) -> bool:
        return True

    def seconds_since(self, earlier: Any) -> float:
        return self._seconds - float(earlier._seconds)


class DeviceMark:
    """The moment at which a GPU has finished all work that was queued so far. Creating a mark does not wait."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Any) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


Mark: TypeAlias = HostMark | DeviceMark  # a moment on the host, or in the work queue of a device


class OwnTimer:
    """Measures the own time of a rank in each step without waiting for the device.

    Under `parallel = fsdp` ranks exchange weights from the beginning of a step, so the own time contains no computation. It then
    shows only slow data and a slow host.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._spans: list[tuple[Mark, Mark]] = []  # finished time spans of the current step
        self._begun = mark()
        self._data_s = 0.0
        self._pending: deque[tuple[list[tuple[Mark, Mark]], float]] = deque()
        self._latest = OwnTime(0.0, 0.0)

    def begin(self) -> None:
        # after the last exchange of the step before
        self._spans, self._begun, self._data_s = [], self._mark(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the body from the own time: work outside of steps, which may wait for other ranks."""
        self._spans.append((self._begun, self._mark()))
        yield
        self._begun = self._mark()

    def waited_for_data(self, seconds: float) -> None:
        self._data_s = seconds

    def end(self) -> None:
        # before the first exchange of the step
        self._pending.append(([*self._spans, (self._begun, self._mark())], self._data_s))

    def latest(self) -> OwnTime:
        """Return the own time of the newest known step. On a GPU that is the newest step that it has finished."""
        while self._pending and self._pending[0][0][-1][1].reached():
            spans, data_s = self._pending.popleft()
            seconds = sum(ended.seconds_since(begun) for begun, ended in spans)
            self._latest = OwnTime(seconds, min(data_s, seconds))
        return self._latest
