"""Decides whether a group of ranks makes no progress, and which rank is the cause."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trainer.watchdog.beat import Beat

__all__ = ["POLL_S", "StallDetector", "Still"]

POLL_S = 0.5
_ASLEEP_S = 10 * POLL_S


@dataclass(frozen=True)
class Still:
    """A rank that makes no progress."""

    rank: int
    beat: Beat
    """Its last heartbeat."""
    seconds: float
    """Time since the last heartbeat."""


class StallDetector:
    """A detector that decides from repeated observations whether a group makes no progress, and which rank is the cause.

    The slowest rank limits the group, because all others wait for it in the next exchange.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._looked_s = -math.inf

    def observe(self, now_s: float, beats: Mapping[int, Beat], stopped: Collection[int] = ()) -> tuple[Still, ...]:
        """Return the ranks that stall the group, the longest silent one first; none while the slowest is within its limit.

        Args:
            now_s: seconds of a clock that never decreases. If much time has passed since the last observation, this process
                did not run, so perhaps no rank did either: all times of silence begin again.
            beats: the last beat of each rank that is alive and not done.
            stopped: ranks that a signal has stopped.
        """
        if now_s - self._looked_s > _ASLEEP_S:
            self._seen.clear()
        self._looked_s = now_s
        self._seen = {
            rank: before if (before := self._seen.get(rank)) and before[0] == beat else (beat, now_s)
            for rank, beat in beats.items()
        }
        still = [Still(rank, beat, now_s - since_s) for rank, (beat, since_s) in self._seen.items()]
        lowest = min((each.beat.place for each in still), default=None)
        slowest = [each for each in still if each.beat.place == lowest]
        if not slowest or any(each.seconds <= each.beat.limit_s for each in slowest):
            return ()
        blamed = [each for each in slowest if each.rank in stopped] or slowest
        return tuple(sorted(blamed, key=lambda each: -each.seconds))
