"""Decides whether a group of ranks makes no progress, and which rank is the cause."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainer.watchdog.heartbeat import Heartbeat

POLL_S = 0.5
_ASLEEP_S = 10 * POLL_S
OTHER_NODE_S = 60.0  # a rank on another node may be late: its own watchdog ends it, and the network shows its file later
_NOBODY: Mapping[int, Heartbeat] = MappingProxyType({})


@dataclass(frozen=True)
class Still:
    rank: int
    beat: Heartbeat  # its last heartbeat
    seconds: float  # time since the last heartbeat
    has_moved: bool = False  # whether the heartbeat has changed since the detector saw it first


class StallDetector:
    """The slowest rank limits the group. Each node's detector judges its own ranks; other heartbeats only delay its decision."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Heartbeat, float, bool]] = {}
        self._looked_s = -math.inf

    def observe(
        self,
        now_s: float,
        beats: Mapping[int, Heartbeat],
        stopped: Collection[int] = (),
        elsewhere: Mapping[int, Heartbeat] = _NOBODY,
    ) -> tuple[Still, ...]:
        """Return the ranks that stall the group, the longest silent one first; none while the slowest is within its limit.

        `elsewhere` has the beats of other nodes; one that has never changed may be left by an earlier start. After a long time
        without an observation all times of silence begin again, because perhaps no rank ran either.
        """
        if now_s - self._looked_s > _ASLEEP_S:
            self._seen.clear()
        self._looked_s = now_s
        self._seen = {rank: self._updated(rank, beat, now_s) for rank, beat in {**elsewhere, **beats}.items()}
        still = {rank: Still(rank, beat, now_s - since_s, moved) for rank, (beat, since_s, moved) in self._seen.items()}
        slowest = _slowest([still[rank] for rank in beats])
        if not slowest or any(each.seconds <= each.beat.limit_s for each in slowest):
            return ()
        others = _slowest([still[rank] for rank in elsewhere if still[rank].has_moved])
        if others and others[0].beat.place < slowest[0].beat.place:
            waits = any(each.seconds <= each.beat.limit_s + OTHER_NODE_S for each in others)
            return () if waits else _longest_first(others)
        return _longest_first([each for each in slowest if each.rank in stopped] or slowest)

    def _updated(self, rank: int, beat: Heartbeat, now_s: float) -> tuple[Heartbeat, float, bool]:
        before = self._seen.get(rank)
        if before is not None and before[0] == beat:
            return before
        return beat, now_s, before is not None


def _slowest(ranks: Collection[Still]) -> list[Still]:
    lowest = min((each.beat.place for each in ranks), default=None)
    return [each for each in ranks if each.beat.place == lowest]


def _longest_first(ranks: Collection[Still]) -> tuple[Still, ...]:
    return tuple(sorted(ranks, key=lambda each: -each.seconds))
