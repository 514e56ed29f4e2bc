"""When a run ends: by its limits at its speed so far, with a cool-down in time for `limits.minutes`, or on request."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NoReturn

from common.errors import GuardError, StoppedBySignal
from trainer.config import ScheduleConfig
from trainer.distributed.group import Group
from trainer.launch.stop_request import StopSignal
from trainer.metrics.monitor import Monitor
from trainer.optim.schedule import cooldown_start
from trainer.runs.adjustments import Adjustment
from trainer.runs.clock import UNTIMED_STEPS
from trainer.runs.limits import StopCriteria
from trainer.runs.state import Progress
from trainer.training.adjuster import Adjuster

_RECENT_S, _APART_S, _LEAST_TIMES = 60.0, 1.0, 4
_PAUSE_FACTOR = 4.0
_SPARE_SHARE = 0.05  # share of the remaining time that a cool-down leaves for steps that are slower than those before it
_LEAST_LEFT = 8  # steps before the end of a cool-down from which on its end does not change any more
_SHORTER, _LONGER = 10, 4  # the end changes by at least one of so many parts of the steps that are left


@dataclass
class StepTimes:
    """The wall-clock time of a step in the last minute, and that of evaluations and saves, from times that all ranks know."""

    times: deque[tuple[int, float]] = field(default_factory=deque)
    """Steps done, and the time at that moment, at least a second apart, without the first steps of the process."""
    last: tuple[int, float] | None = None
    num_seen: int = 0
    paused_s: float = 0.0  # time of evaluations and saves, without those in the first steps of the process
    seconds_each: float | None = None  # seconds of a step without evaluations and saves; None if no step has been measured yet

    def add(self, steps_done: int, seconds: float) -> None:
        """Add the time at which a step began. A step back, after a rollback, begins a new measurement."""
        if self.last is not None and steps_done <= self.last[0]:
            self.times.clear()
            self.num_seen, self.paused_s, self.seconds_each = 0, 0.0, None
        elif self.last is not None and self.seconds_each is not None:
            lap_s = seconds - self.last[1]
            self.paused_s += lap_s - self.seconds_each if lap_s > _PAUSE_FACTOR * self.seconds_each else 0.0
        self.num_seen += 1
        self.last = (steps_done, seconds)
        if self.num_seen <= UNTIMED_STEPS:
            return
        is_apart = not self.times or seconds >= self.times[-1][1] + _APART_S
        if is_apart or len(self.times) == 1:
            self.seconds_each = self._measured([*self.times, self.last])
        if is_apart:
            self.times.append(self.last)
        while len(self.times) > _LEAST_TIMES and self.times[1][1] <= seconds - _RECENT_S:
            self.times.popleft()

    def last_step_before(self, deadline_s: float, pause_s: float = 0.0) -> int | None:
        """`pause_s` is the least time of evaluations for each step. None if no step has been measured yet."""
        if self.seconds_each is None or self.last is None:
            return None
        each_s = self.seconds_each + max(pause_s, self.paused_s / (self.num_seen - UNTIMED_STEPS))
        remaining_s = (deadline_s - self.last[1]) * (1 - _SPARE_SHARE)
        return self.last[0] + max(0, math.floor(remaining_s / each_s)) if each_s > 0 else None

    def _measured(self, points: Sequence[tuple[int, float]]) -> float | None:
        spans = [(then[0] - now[0], then[1] - now[1]) for now, then in pairwise(points)]
        if not spans:
            return None
        longest = _PAUSE_FACTOR * median(seconds / steps for steps, seconds in spans)
        usual = [(steps, seconds) for steps, seconds in spans if seconds / steps <= longest]  # others have an evaluation or a save
        return sum(seconds for _, seconds in usual) / sum(steps for steps, _ in usual)


@dataclass
class RunEnd:
    """Decides when the run ends. All ranks have the same times, so they make the same decisions."""

    criteria: StopCriteria
    schedule: ScheduleConfig
    batch_tokens: int
    """Tokens of a global batch: the bound of its targets, because a rank that cannot read its rows cannot count theirs."""
    adjuster: Adjuster  # makes the adjustment for a cool-down that begins early
    cooldown: Adjustment | None  # the cool-down that has begun in time for the end of `limits.minutes`
    times: StepTimes = field(default_factory=StepTimes)
    follows_speed: bool = False
    """Whether this start has begun a cool-down. That of an earlier start keeps its end, so that a resume has the same bits."""

    @property
    def last_step(self) -> int | None:
        return self.criteria.certain_step if self.cooldown is None else self.cooldown.cooldown_end

    def ended_by(self, progress: Progress) -> str | None:
        return self.criteria.ended_by(progress, None if self.cooldown is None else self.cooldown.cooldown_end)

    def finished(self, progress: Progress) -> bool:
        return self.ended_by(progress) is not None

    def may_reach_targets(self, progress: Progress) -> bool:
        return self.criteria.may_reach_targets(progress, self.batch_tokens)

    def left_s(self, step: int, seconds: float) -> float | None:
        """Return the expected time until the first limit ends the run, after `step` steps in `seconds`; None if it is not known."""
        last, each_s = self.last_step or self.criteria.expected_steps, self.times.seconds_each
        bounds = [] if self.criteria.seconds is None else [self.criteria.seconds - seconds]
        if last and each_s is not None:
            bounds.append((last - step) * each_s)
        return max(0.0, min(bounds)) if bounds else None

    def decay(self) -> tuple[int, float | None]:
        """Return the step at which the learning rate reaches its floor, and the steps before a cool-down that is not planned."""
        if self.cooldown is None or self.cooldown.cooldown_end is None:
            return self.criteria.decay_steps, None
        return self.cooldown.cooldown_end, _begin_of(self.cooldown)

    def cool_down_in_time(self, progress: Progress) -> None:
        """Begin the cool-down of `wsd` with the next step if `limits.minutes` would otherwise end the run before or during it. The
        record holds the adjustment before the next step is made.
        """
        criteria, step, times = self.criteria, progress.step, self.times
        self.cooldown = self.adjuster.adjustments.cooldown(step)
        if not criteria.may_cool_early or (self.cooldown is not None and not self.follows_speed):
            return
        end: int | None = None  # the last step before `limits.minutes` ends the run
        if criteria.seconds is not None and times.seconds_each is not None:
            pause_s = max(0.0, progress.ending_s - 2 * times.seconds_each) / criteria.eval.every_steps
            end = times.last_step_before(criteria.seconds - progress.ending_s, pause_s)
            end = None if end is None else end + 2  # `ending_s` has one more step
        if self.cooldown is not None:
            self._move_end(end, self.cooldown, step)
            return
        if end is None or step < cooldown_start(self.schedule, end):
            return
        planned = criteria.decay_steps
        if planned and (end >= planned or step >= cooldown_start(self.schedule, planned)):
            return  # the planned cool-down ends in time, or has begun
        reason = f"limits.minutes ends the run after about {end} steps"
        self._begin(Adjustment(step=step + 1, reason=reason, cooldown_end=max(end, step + 2)))
        self.follows_speed = True

    def _move_end(self, end: int | None, cooldown: Adjustment, step: int) -> None:
        """Let a cool-down that has begun end at another step, if the speed has changed, without a jump of the learning rate."""
        planned = cooldown.cooldown_end or 0
        end = planned if end is None else min(end, self.criteria.decay_steps or end)
        left = planned - step
        # A run that ends before its rate has fallen loses more than one that ends early.
        if left < _LEAST_LEFT or -left / _SHORTER < end - planned < left / _LONGER:
            return
        begin = _begin_of(cooldown)
        end, done = max(end, step + 2), (step - begin) / (planned - begin)
        reason = f"at the speed of the last minute, limits.minutes ends the run after about {end} steps"
        begin = (step - done * end) / (1 - done)
        self._begin(Adjustment(step=step + 1, reason=reason, cooldown_end=end, cooldown_begin=begin))

    def _begin(self, cooldown: Adjustment) -> None:
        self.cooldown = cooldown
        self.adjuster.make(cooldown)


def _begin_of(cooldown: Adjustment) -> float:
    return cooldown.step - 1 if cooldown.cooldown_begin is None else cooldown.cooldown_begin


@dataclass(frozen=True)
class StopRequests:
    signal: StopSignal
    group: Group
    monitor: Monitor | None = None  # has the alert with the action `stop`; None before the run is open

    @property
    def requested(self) -> bool:
        return self.signal.name is not None or (self.monitor is not None and self.monitor.stop_alert is not None)

    @property
    def reason(self) -> str:
        alert = None if self.monitor is None else self.monitor.stop_alert
        return alert.message if alert is not None else self.signal.name or "a signal to another rank, or an alert there"

    def end_start_if_asked(self, run: Path, newest_step: Callable[[], int | None]) -> None:
        """End the start if a rank was asked to stop. No file of the run has changed yet. `newest_step` is called on rank 0.

        An engine takes StoppedBySignal as a reason to start again, so Ctrl-C without a checkpoint is a KeyboardInterrupt.
        """
        if self.group.smallest(-1 if self.requested else 0) == 0:
            return
        newest = self.group.on_main(newest_step)
        saved = "has no checkpoint yet" if newest is None else f"has its checkpoint of step {newest}"
        message = f"no step was trained, and no file was changed; {run} {saved}; run the same command again to go on"
        if newest is None and self.signal.name == "SIGINT":
            raise KeyboardInterrupt(message)
        raise StoppedBySignal(message if self.group.local_rank == 0 else "")

    def end_training(self, run: Path, step: int) -> NoReturn:
        """Raises GuardError on every rank if an alert of any rank ended the training, else StoppedBySignal."""
        alert = None if self.monitor is None else self.monitor.stop_alert
        if self.group.smallest(0 if alert is None else -1) < 0:
            raise GuardError("" if alert is None else alert.message)
        message = f"saved step {step} in {run}; run the same command again to go on"
        raise StoppedBySignal(message if self.group.local_rank == 0 else "")
