"""Finds a rank that is slower than the others, from the time that each one works before it waits for them.

The last exchange of a step ends on all ranks at one moment, so what a rank needs from there to the first exchange of the next
step is its own. The step's duration says nothing: it is the same on all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["OwnTime", "OwnTimer", "SlowRank", "StragglerDetector", "slow_rank"]

WINDOW_STEPS = 15
_SLOW_STEPS = 11
"""Of the window, in which a slow rank must have been slow: a few long pauses are no slow rank."""
_STEP_FACTOR = 1.5
_FACTOR = 2.0
_LEAST_EXCESS_S = 0.01
_LEAST_SHARE = 0.1
_SILENT_STEPS = 1000


@dataclass(frozen=True)
class OwnTime:
    """How long a rank worked in one step before it could wait for another."""

    seconds: float
    data_s: float
    """The part in which it waited for its own data."""


@dataclass(frozen=True)
class SlowRank:
    """A rank for which the others wait."""

    rank: int
    factor: float
    """Its own time, relative to the median of the other ranks."""
    phase: Literal["data", "compute"]
    """Where most of the difference arises."""
    seconds: float
    """Its own time in one step; median over the window."""
    others_s: float
    """The same for the other ranks."""

    def describe(self) -> str:
        """One line for people."""
        advice = (
            "look at its storage, or raise prefetch"
            if self.phase == "data"
            else "look at the clock and temperature of its device, and at other processes on its machine"
        )
        return (
            f"rank {self.rank} is slow: {self.seconds * 1000:.0f} ms of its own in each step, where the other ranks take "
            f"{self.others_s * 1000:.0f} ms ({self.factor:.1f} times), most of the difference in {self.phase}; "
            f"all ranks wait for it. Training goes on; {advice}"
        )


def slow_rank(own_SR: NDArray[np.float64], data_SR: NDArray[np.float64], step_s: float) -> SlowRank | None:
    """The rank that is slowest, if it is slow by any measure; S steps, R ranks.

    It is where its median is at least twice that of the other ranks, where it has been 1.5 times slower than they in 11 of
    15 steps, and where what it costs matters: 10 ms and a tenth of a step.

    Args:
        own_SR: each rank's own time in each step, in seconds.
        data_SR: the part of it in which the rank waited for data.
        step_s: duration of a step.
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
    """Reports a slow rank once, and again when another one is slow, or after 1,000 steps."""

    def __init__(self) -> None:
        self._times: deque[tuple[Sequence[OwnTime], float]] = deque(maxlen=WINDOW_STEPS)
        self._uneven: deque[bool] = deque(maxlen=WINDOW_STEPS)
        """Whether any rank was slow in the step: where too few were so, there is nothing to compute."""
        self._reported: tuple[int, int] | None = None
        """Rank, and steps since then."""

    def observe(self, times_by_rank: Sequence[OwnTime], step_s: float) -> SlowRank | None:
        """The rank that is found slow with this step, if one is and it has not been reported lately."""
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


class Mark(Protocol):
    """A moment on the host, or in the work of a device."""

    def reached(self) -> bool:
        """True once it has passed."""

    def seconds_since(self, earlier: Mark) -> float:
        """Time from `earlier`, which is of the same kind; both have passed."""


class HostMark:
    """Now, on this processor."""

    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def reached(self) -> bool:
        """Always."""
        return True

    def seconds_since(self, earlier: Mark) -> float:
        """Time between the two."""
        return self._seconds - cast(HostMark, earlier)._seconds


class DeviceMark:
    """The moment at which a GPU has done all that it has been given until now; nothing waits for it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def reached(self) -> bool:
        """True once the GPU has come so far."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        """Time between the two."""
        return float(cast(DeviceMark, earlier)._event.elapsed_time(self._event)) / 1000


class OwnTimer:
    """Measures a rank's own time in each step, without a wait for the device.

    Under `parallel = fsdp` ranks exchange weights from the beginning of a step on, so of the computation nothing is a rank's own;
    what is found there are slow data and a slow host.

    Args:
        mark: makes a mark of the present moment; `HostMark` or `DeviceMark`.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._spans: list[tuple[Mark, Mark]] = []
        """Of the step under way, those that are over."""
        self._begun = mark()
        self._data_s = 0.0
        self._pending: deque[tuple[list[tuple[Mark, Mark]], float]] = deque()
        self._latest = OwnTime(0.0, 0.0)

    def begin(self) -> None:
        """To be called after the last exchange of a step."""
        self._spans, self._begun, self._data_s = [], self._mark(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around anything that is no part of a step and may wait for the other ranks."""
        self._spans.append((self._begun, self._mark()))
        yield
        self._begun = self._mark()

    def waited_for_data(self, seconds: float) -> None:
        """Notes for how long the batch of this step was waited for."""
        self._data_s = seconds

    def end(self) -> None:
        """To be called before the first exchange of a step."""
        self._pending.append(([*self._spans, (self._begun, self._mark())], self._data_s))

    def latest(self) -> OwnTime:
        """The newest step that is known: on the host this one, on a device one that it has finished."""
        while self._pending and self._pending[0][0][-1][1].reached():
            spans, data_s = self._pending.popleft()
            seconds = sum(ended.seconds_since(begun) for begun, ended in spans)
            self._latest = OwnTime(seconds, min(data_s, seconds))
        return self._latest
