"""The end of a run, and the length of its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from common.errors import ConfigError
from data_pipeline.dataset.manifest import Manifest
from trainer.config import EvalConfig, TrainConfig
from trainer.run.progress import Evaluated, Progress

__all__ = ["Plan", "early_stop", "evaluations_without_gain", "plan_run"]


def early_stop(evaluations: Sequence[Evaluated], settings: EvalConfig) -> str | None:
    """Return why training ends after the last of these evaluations; None if it continues."""
    if settings.patience is None:
        return None
    stale, best = evaluations_without_gain(evaluations, settings.min_delta)
    if stale < settings.patience:
        return None
    if best is None or best.val_loss is None:
        return f"none of {stale} evaluations gave a number (eval.patience = {settings.patience})"
    return (
        f"{stale} evaluations in a row did not improve on the validation loss {best.val_loss:.4f} of step {best.step} by more than "
        f"eval.min_delta = {settings.min_delta:g} (eval.patience = {settings.patience})"
    )


def evaluations_without_gain(evaluations: Sequence[Evaluated], min_delta: float) -> tuple[int, Evaluated | None]:
    """Return the number of evaluations since the last improvement, and the evaluation that improved."""
    stale, reference = 0, math.inf
    best: Evaluated | None = None
    for evaluated in evaluations:
        if evaluated.val_loss is not None and evaluated.val_loss < reference - min_delta:
            stale, best, reference = 0, evaluated, evaluated.val_loss
        else:
            stale += 1
    return stale, best


@dataclass(frozen=True)
class Plan:
    """The end of the run, from its limits and the size of the data."""

    steps: int | None
    rows: int | None
    targets: int | None
    seconds: float | None
    decay_steps: int
    """Step at which the learning rate reaches its floor."""
    last_step: int | None
    """The step at which the limits on steps and epochs end the run."""
    eval: EvalConfig
    """Its patience may end the run before the limits."""

    def finished(self, progress: Progress) -> bool:
        """Return whether a limit is reached, or the evaluations have not improved for too long."""
        return self.ended_by(progress) is not None

    def may_reach_targets(self, progress: Progress, more: int) -> bool:
        """Return whether `more` further targets would reach the limit on targets."""
        return self.targets is not None and progress.targets + more >= self.targets

    def ended_by(self, progress: Progress) -> str | None:
        """Return the first limit that is reached, or why the evaluations end the run; None while it continues."""
        reached = (
            ("limits.steps", self.steps, progress.step),
            ("limits.epochs", self.rows, progress.rows),
            ("limits.tokens", self.targets, progress.targets),
            ("limits.minutes", self.seconds, progress.seconds),
        )
        limit = next((name for name, last, now in reached if last is not None and now >= last), None)
        return limit or early_stop(progress.evaluations, self.eval)


def plan_run(config: TrainConfig, manifest: Manifest, num_rows: int) -> Plan:
    """Return the end of the run in every unit, and the length of the learning-rate schedule.

    A limit in tokens is converted to steps with the mean number of targets in a row. Only the schedule uses this estimate; the run
    itself counts its tokens.
    """
    limits, batch_rows = config.limits, config.batch.global_rows
    # A decimal fraction: 1.1 epochs of 350 rows are 385 rows, and the product of floats is slightly more.
    epoch_rows = None if limits.epochs is None else math.ceil(Fraction(str(limits.epochs)) * num_rows)
    row_targets = sum(shard.targets for shard in manifest.shards if shard.split == "train") / num_rows
    counted = [limits.steps, None if epoch_rows is None else math.ceil(epoch_rows / batch_rows)]
    certain = [steps for steps in counted if steps is not None]
    estimated = [] if limits.tokens is None else [max(1, math.ceil(limits.tokens / row_targets / batch_rows))]
    decay_steps = config.schedule.decay_steps or min(certain + estimated)
    if config.schedule.kind != "constant" and config.schedule.warmup_steps >= decay_steps:
        raise ConfigError(
            f"schedule.warmup_steps = {config.schedule.warmup_steps}, but the learning rate must reach its "
            f"floor at step {decay_steps}; warm up for fewer steps, train longer, or set schedule.decay_steps"
        )
    return Plan(
        steps=limits.steps,
        rows=epoch_rows,
        targets=limits.tokens,
        seconds=None if limits.minutes is None else limits.minutes * 60,
        decay_steps=decay_steps,
        last_step=min(certain) if certain and limits.tokens is None else None,
        eval=config.eval,
    )
