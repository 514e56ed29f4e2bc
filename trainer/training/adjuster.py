"""Makes adjustments: smaller micro-batches, a quarantine of shards that cannot be read, and a cool-down in time for the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from common.errors import ConfigError, ProjectError
from trainer.data.adjustments import Adjustment, Adjustments, smaller_micro
from trainer.data.bad_shards import decide
from trainer.distributed.group import LET_GO_S
from trainer.machine.memory import release_memory
from trainer.metrics import Monitor
from trainer.model.forward import LossModule
from trainer.optim.schedule import cooldown_start
from trainer.parallel.accumulation import Accumulation
from trainer.parallel.wrapping import MicroTooLarge, wrap_for_training
from trainer.runs.context import RunContext
from trainer.runs.events import AlertEvent
from trainer.runs.ledger import Ledger
from trainer.runs.limits import Plan
from trainer.runs.progress import Progress
from trainer.runs.record import leave_note, note_adjustment

__all__ = ["Adjuster", "smaller_batches", "wrapped"]

_log = logging.getLogger(__name__)
_LEAST_LEFT = 8
"""Steps before the end of a cool-down from which on its end does not change any more."""
_SHORTER, _LONGER = 10, 4
"""The end changes by at least one of so many parts of the steps that are left."""


@dataclass
class Adjuster:
    """Stores adjustments durably, and announces them."""

    context: RunContext
    adjustments: Adjustments
    """All adjustments so far, of this start of the run and of earlier ones."""
    monitor: Monitor
    ledger: Ledger | None
    """None on all ranks except rank 0."""
    follows_speed: bool = False
    """Whether this start has begun a cool-down. That of an earlier start keeps its end, so that a resume has the same bits."""

    def make(self, adjustment: Adjustment) -> None:
        """Add an adjustment, and write it into the record, where the next start of the run reads it."""
        self.adjustments = self.adjustments.plus(adjustment)
        self.context.group.on_main(lambda: note_adjustment(self.context.config.run, adjustment))

    def announce(self, adjustment: Adjustment, step: int, *, after: int) -> None:
        """Raise the alert of an adjustment at `step`, and write it into the ledger behind the step `after`.

        A cool-down is no fault, so it is only logged.
        """
        if adjustment.kind == "cooldown":
            _log.info("%s", adjustment.describe())
        else:
            rule = "quarantine" if adjustment.kind == "quarantine" else "out_of_memory"
            self.monitor.alert(AlertEvent(rule, step, "critical", adjustment.describe(), "log"))
        if self.ledger is not None:
            self.ledger.event(adjustment.kind, step=after, **adjustment.facts())

    def quarantine(self, found: Mapping[str, tuple[int, int]], faults: Mapping[str, ProjectError], step: int) -> Adjustment:
        """Return the adjustment that leaves out shards that cannot be read.

        Args:
            found: the result of `shared_faults`.
            faults: the errors of this rank, by shard.
            step: the first step without the shards.

        Raises:
            ProjectError: `bad_data.policy` is `stop`, or the lost rows exceed `bad_data.max_share`.
        """
        context = self.context
        known = self.adjustments.quarantined(step)
        return decide(found, faults, context.config.bad_data, context.manifest, context.group, step=step, known=known)

    def cool_down_in_time(self, limits: Plan, progress: Progress) -> None:
        """Begin the cool-down of `wsd` with the next step if `limits.minutes` would otherwise end the run before or during it.

        The pace so far gives the last step. The cool-down begins at the step at which a planned one with that end would begin.
        All ranks have the same times, so they make the same decision. The record holds the adjustment before the next step is made.
        """
        schedule, step = self.context.config.schedule, progress.step
        limits.cooldown = self.adjustments.cooldown(step)
        if not limits.may_cool_early or (limits.cooldown is not None and not self.follows_speed):
            return
        end = limits.last_step_in_time(progress.ending_s)
        if limits.cooldown is not None:
            self._end_cooldown_at(end, limits.cooldown, limits, step)
            return
        if end is None or step < cooldown_start(schedule, end):
            return
        if limits.decay_steps and (end >= limits.decay_steps or step >= cooldown_start(schedule, limits.decay_steps)):
            return  # the planned cool-down ends in time, or has begun
        last = max(end, step + 2)
        reason = f"limits.minutes ends the run after about {end} steps"
        limits.cooldown = Adjustment(step=step + 1, reason=reason, cooldown_end=last)
        self.make(limits.cooldown)
        self.follows_speed = True

    def _end_cooldown_at(self, end: int | None, cooldown: Adjustment, limits: Plan, step: int) -> None:
        """Let a cool-down that has begun end at another step, if the speed has changed, without a jump of the learning rate."""
        planned = cooldown.cooldown_end or 0
        end = planned if end is None else min(end, limits.decay_steps or end)
        left = planned - step
        # A run that ends before its rate has fallen loses more than one that ends early.
        if left < _LEAST_LEFT or -left / _SHORTER < end - planned < left / _LONGER:
            return
        begin = cooldown.step - 1 if cooldown.cooldown_begin is None else cooldown.cooldown_begin
        end, done = max(end, step + 2), (step - begin) / (planned - begin)
        reason = f"at the speed of the last minute, limits.minutes ends the run after about {end} steps"
        begin = (step - done * end) / (1 - done)
        limits.cooldown = Adjustment(step=step + 1, reason=reason, cooldown_end=end, cooldown_begin=begin)
        self.make(limits.cooldown)

    def wrapped(self, loss: LossModule, step: int) -> tuple[nn.Module, Accumulation]:
        """Wrap the model for a step of a running training, and make the adjustments that this needs."""
        module, accumulation, adjustments = wrapped(loss, self.context, self.adjustments, step)
        for adjustment in adjustments.made[len(self.adjustments.made) :]:
            self.make(adjustment)
        return module, accumulation

    def note_for_next_start(self, step: int) -> None:
        """Write a note, on this rank alone: the next start of the run uses smaller micro-batches from this step on.

        Raises:
            ConfigError: see `smaller_batches`.
        """
        adjustment = smaller_batches(self.context, self.adjustments, step)
        leave_note(self.context.config.run, adjustment, self.context.group.rank)


def wrapped(
    loss: LossModule, context: RunContext, adjustments: Adjustments, step: int
) -> tuple[nn.Module, Accumulation, Adjustments]:
    """Wrap the model for the micro-batches of a step, or for smaller ones if these do not fit into memory.

    Returns:
        The module and the accumulation of `wrap_for_training`, and all adjustments, with those that were needed to fit.

    Raises:
        ConfigError: see `smaller_batches`.
    """
    while True:
        batch = adjustments.batch(context.config.batch, step)
        try:
            adjusted = replace(context, config=context.config.model_copy(update={"batch": batch}))
            return *wrap_for_training(loss, adjusted), adjustments
        except MicroTooLarge:
            time.sleep(LET_GO_S)  # before this handler drops DDP, which may have made exchanges: see `trainer.distributed.group`
            adjustment = smaller_batches(context, adjustments, step)
        adjustments = adjustments.plus(adjustment)
        release_memory()


def smaller_batches(context: RunContext, adjustments: Adjustments, step: int) -> Adjustment:
    """Return the adjustment after a lack of memory in a step: smaller micro-batches, and more of them, with the same gradient.

    Raises:
        ConfigError: a micro-batch has a single row already, or `reproducibility = elastic` fixes its size.
    """
    now = adjustments.batch(context.config.batch, step).micro_rows
    remedies = "model.activation_checkpointing = full, precision = bf16, parallel = fsdp with more ranks, or a smaller model"
    if context.config.reproducibility == "elastic":
        raise ConfigError(
            f"step {step}: out of memory with batch.micro = {now}, which cannot change under reproducibility = elastic, because "
            f"the bits depend on it; start a new run with a smaller batch.micro, or use {remedies}"
        )
    smaller = smaller_micro(now)
    if smaller is None:
        raise ConfigError(f"step {step}: out of memory with a single row in a micro-batch; use {remedies}, or shorter rows")
    return Adjustment(step=step, reason=f"{now} rows ran out of memory", micro=smaller)
