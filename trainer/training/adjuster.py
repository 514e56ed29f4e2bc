"""Makes adjustments: smaller micro-batches, and a quarantine of shards that cannot be read. It stores those of a cool-down too."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from common.errors import ConfigError, ProjectError
from trainer.context import RunContext
from trainer.data.bad_shards import decide
from trainer.distributed.group import TEARDOWN_DELAY_S
from trainer.machine.memory import release_memory
from trainer.metrics.monitor import Monitor
from trainer.model.forward import LossModule
from trainer.parallel.accumulation import Accumulation
from trainer.parallel.wrapping import MicroTooLarge, wrap_for_training
from trainer.runs.adjustments import Adjustment, Adjustments, smaller_micro
from trainer.runs.events import AlertEvent
from trainer.runs.ledger import Ledger
from trainer.runs.record import leave_note, note_adjustment

_log = logging.getLogger(__name__)


@dataclass
class Adjuster:
    context: RunContext
    adjustments: Adjustments  # all adjustments so far, of this start of the run and of earlier ones
    monitor: Monitor
    ledger: Ledger | None  # None on all ranks except rank 0

    def make(self, adjustment: Adjustment) -> None:
        self.adjustments = self.adjustments.plus(adjustment)
        self.context.group.on_main(lambda: note_adjustment(self.context.config.run, adjustment))

    def announce(self, adjustment: Adjustment, step: int, *, after: int) -> None:
        """Raise the alert at `step`; write the ledger behind the step `after`. A cool-down is no fault, so it is only logged."""
        if adjustment.kind == "cooldown":
            _log.info("%s", adjustment.describe())
        else:
            rule = "quarantine" if adjustment.kind == "quarantine" else "out_of_memory"
            self.monitor.alert(AlertEvent(rule, step, "critical", adjustment.describe(), "log"))
        if self.ledger is not None:
            self.ledger.event(adjustment.kind, step=after, **adjustment.facts())

    def quarantine(self, found: Mapping[str, tuple[int, int]], faults: Mapping[str, ProjectError], step: int) -> Adjustment:
        context, known = self.context, self.adjustments.quarantined(step)
        adjustment = decide(found, faults, context.config.data_errors, context.manifest, context.group, step=step, known=known)
        self.make(adjustment)
        return adjustment

    def wrapped(self, loss: LossModule, step: int) -> tuple[nn.Module, Accumulation]:
        module, accumulation, adjustments = wrapped(loss, self.context, self.adjustments, step)
        for adjustment in adjustments.made[len(self.adjustments.made) :]:
            self.make(adjustment)
        return module, accumulation

    def note_for_next_start(self, step: int) -> None:
        """Write a note, on this rank alone: the next start of the run uses smaller micro-batches from this step on."""
        adjustment = smaller_batches(self.context, self.adjustments, step)
        leave_note(self.context.config.run, adjustment, self.context.group.rank)


def wrapped(
    loss: LossModule, context: RunContext, adjustments: Adjustments, step: int
) -> tuple[nn.Module, Accumulation, Adjustments]:
    while True:
        batch = adjustments.batch(context.config.batch, step)
        try:
            return *wrap_for_training(loss, context.with_batch(batch)), adjustments
        except MicroTooLarge:
            # Before this handler drops DDP, which may have made exchanges: see `trainer.distributed.group`.
            time.sleep(TEARDOWN_DELAY_S)
            adjustment = smaller_batches(context, adjustments, step)
        adjustments = adjustments.plus(adjustment)
        release_memory()


def smaller_batches(context: RunContext, adjustments: Adjustments, step: int) -> Adjustment:
    """Return the adjustment after a lack of memory in a step: smaller micro-batches, and more of them, with the same gradient."""
    now = adjustments.batch(context.config.batch, step).micro_rows
    remedies = "model.activation_checkpointing = full, precision = bf16, parallel = fsdp with more ranks, or a smaller model"
    if context.config.reproducibility == "elastic":
        raise ConfigError(
            f"step {step}: out of memory with batch.micro_batch_size = {now}, which cannot change under reproducibility = elastic, "
            f"because the bits depend on it; start a new run with a smaller batch.micro_batch_size, or use {remedies}"
        )
    smaller = smaller_micro(now)
    if smaller is None:
        raise ConfigError(f"step {step}: out of memory with a single row in a micro-batch; use {remedies}, or shorter rows")
    return Adjustment(step=step, reason=f"{now} rows ran out of memory", micro=smaller)
