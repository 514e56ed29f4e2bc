"""Changes that a run makes to itself: smaller micro-batches after a lack of memory, shards left out that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from common.errors import ConfigError, ProjectError
from trainer.data.adjustments import Adjustment, Adjustments, smaller_micro
from trainer.data.bad_shards import decide
from trainer.health.alerts import Alert, Rule
from trainer.machine.memory import release_memory
from trainer.metrics import Monitor
from trainer.model.forward import LossModule
from trainer.parallel.accumulation import Accumulation
from trainer.parallel.wrapping import MicroTooLarge, wrap_for_training
from trainer.run.context import RunContext
from trainer.run.ledger import Ledger
from trainer.run.record import leave_note, note_adjustment

__all__ = ["Adjuster", "smaller_batches", "wrapped"]


@dataclass
class Adjuster:
    """Makes an adjustment durable, and announces it."""

    context: RunContext
    adjustments: Adjustments
    """All that were made so far, by this start of the run and by earlier ones."""
    monitor: Monitor
    ledger: Ledger | None
    """On rank 0."""

    def make(self, adjustment: Adjustment) -> None:
        """Adds an adjustment, and notes it where the next start of the run finds it."""
        self.adjustments = self.adjustments.plus(adjustment)
        self.context.group.on_main(lambda: note_adjustment(self.context.config.run, adjustment))

    def announce(self, adjustment: Adjustment, step: int, *, after: int) -> None:
        """Shows an adjustment to the user at the step for which it was made; in the ledger it follows the step `after`."""
        rule: Rule = "quarantine" if adjustment.kind == "quarantine" else "out_of_memory"
        self.monitor.alert(Alert(rule, step, "critical", adjustment.describe(), "log"))
        if self.ledger is not None:
            self.ledger.event(adjustment.kind, step=after, **adjustment.facts())

    def quarantine(self, found: Mapping[str, tuple[int, int]], faults: Mapping[str, ProjectError], step: int) -> Adjustment:
        """The adjustment that leaves shards out that cannot be read.

        Args:
            found: from `shared_faults`.
            faults: the errors of this rank, by shard.
            step: the first step without the shards.

        Raises:
            ProjectError: the policy is to stop, or too much is lost.
        """
        context = self.context
        known = self.adjustments.quarantined(step)
        return decide(found, faults, context.config.bad_data, context.manifest, context.group, step=step, known=known)

    def wrapped(self, loss: LossModule, step: int) -> tuple[nn.Module, Accumulation]:
        """`wrapped` for a step of a run that is under way; the adjustments that it takes are made."""
        module, accumulation, adjustments = wrapped(loss, self.context, self.adjustments, step)
        for adjustment in adjustments.made[len(self.adjustments.made) :]:
            self.make(adjustment)
        return module, accumulation

    def note_for_next_start(self, step: int) -> None:
        """Notes, on this rank alone, that the next start of the run takes smaller micro-batches from a step on.

        Raises:
            ConfigError: there are none.
        """
        adjustment = smaller_batches(self.context, self.adjustments, step)
        leave_note(self.context.config.run, adjustment, self.context.group.rank)


def wrapped(
    loss: LossModule, context: RunContext, adjustments: Adjustments, step: int
) -> tuple[nn.Module, Accumulation, Adjustments]:
    """`wrap_for_training` for the micro-batches of a step, or for smaller ones if these do not fit; and all adjustments then.

    Raises:
        ConfigError: see `smaller_batches`.
    """
    while True:
        batch = adjustments.batch(context.config.batch, step)
        try:
            adjusted = replace(context, config=context.config.model_copy(update={"batch": batch}))
            return *wrap_for_training(loss, adjusted), adjustments
        except MicroTooLarge:
            adjustment = smaller_batches(context, adjustments, step)
        adjustments = adjustments.plus(adjustment)
        release_memory()


def smaller_batches(context: RunContext, adjustments: Adjustments, step: int) -> Adjustment:
    """The adjustment after a lack of memory in a step: smaller micro-batches, and more of them, which give the same gradient.

    Raises:
        ConfigError: there are no smaller ones, or they would be another sum under `reproducibility = elastic`.
    """
    now = adjustments.batch(context.config.batch, step).micro_rows
    remedies = "model.activation_checkpointing = full, precision = bf16, parallel = fsdp with more ranks, or a smaller model"
    if context.config.reproducibility == "elastic":
        raise ConfigError(
            f"step {step}: out of memory with batch.micro = {now}, which reproducibility = elastic fixes, as the bits depend on "
            f"it; begin a run with a smaller batch.micro, or use {remedies}"
        )
    smaller = smaller_micro(now)
    if smaller is None:
        raise ConfigError(f"step {step}: out of memory with a single row in a micro-batch; use {remedies}, or shorter rows")
    return Adjustment(step, f"{now} rows ran out of memory", micro=smaller)
