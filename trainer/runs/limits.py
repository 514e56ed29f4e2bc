"""The end of a run, and the length of its learning-rate schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from common.errors import ConfigError
from data_pipeline.dataset.manifest import Manifest
from trainer.config import EvalConfig, TrainConfig
from trainer.runs.state import Evaluated, Progress

_log = logging.getLogger(__name__)
_PARTS_OF_RUN = 10  # the warm-up is the first of this many parts of a run that is not longer than the warm-up of the settings


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
    stale, reference = 0, math.inf
    best: Evaluated | None = None
    for evaluated in evaluations:
        if evaluated.val_loss is not None and evaluated.val_loss < reference - min_delta:
            stale, best, reference = 0, evaluated, evaluated.val_loss
        else:
            stale += 1
    return stale, best


@dataclass(frozen=True)
class StopCriteria:
    steps: int | None
    rows: int | None
    targets: int | None
    seconds: float | None
    decay_steps: int  # when the rate reaches its floor; 0 if it does not depend on the last step, or that is not known
    certain_step: int | None  # the step at which the limits on steps and epochs end the run
    expected_steps: int  # the number of steps until the first of the limits on steps, epochs and tokens; 0 if none is set
    eval: EvalConfig  # its patience may end the run before the limits
    may_cool_early: bool = False  # whether the cool-down may begin before its planned step, because `limits.minutes` ends the run

    def may_reach_targets(self, progress: Progress, more: int) -> bool:
        return self.targets is not None and progress.targets + more >= self.targets

    def ended_by(self, progress: Progress, cooldown_end: int | None = None) -> str | None:
        """`cooldown_end` is the last step of a cool-down that has begun in time for the end of `limits.minutes`."""
        reached = (
            ("limits.steps", self.steps, progress.step),
            ("limits.epochs", self.rows, progress.rows),
            ("limits.tokens", self.targets, progress.targets),
            ("limits.minutes", self.seconds, progress.seconds + progress.ending_s),
            ("limits.minutes", cooldown_end, progress.step),
        )
        limit = next((name for name, last, now in reached if last is not None and now >= last), None)
        return limit or early_stop(progress.evaluations, self.eval)


def plan_run(config: TrainConfig, manifest: Manifest, num_rows: int) -> StopCriteria:
    """Return the end of the run in every unit, and the length of the schedule.

    A limit in tokens becomes steps by the mean targets of a row. Only the schedule uses this estimate; the run counts its tokens.
    A run that only `limits.minutes` ends has no length at the start.
    """
    limits, schedule, length = config.limits, config.schedule, _length(config, manifest, num_rows)
    decay_steps = length.expected_steps if schedule.decay_steps is None else schedule.decay_steps
    if schedule.kind != "constant" and 0 < decay_steps <= schedule.warmup_steps:
        raise ConfigError(
            f"schedule.warmup_steps = {schedule.warmup_steps}, but the learning rate must reach its "
            f"floor at step {decay_steps}; warm up for fewer steps, or set a larger schedule.decay_steps"
        )
    return StopCriteria(
        steps=limits.steps,
        rows=length.epoch_rows,
        targets=limits.tokens,
        seconds=None if limits.minutes is None else limits.minutes * 60,
        decay_steps=decay_steps,
        certain_step=length.certain_step,
        expected_steps=length.expected_steps,
        eval=config.eval,
        may_cool_early=schedule.kind == "wsd" and schedule.decay_steps is None and limits.minutes is not None,
    )


def with_shorter_warmup(config: TrainConfig, manifest: Manifest, num_rows: int) -> TrainConfig:
    """Return the settings with a warm-up of a tenth of a run that would end within its warm-up. `schedule.decay_steps` has none."""
    schedule, num_steps = config.schedule, _length(config, manifest, num_rows).expected_steps
    if schedule.decay_steps is not None or not 0 < num_steps <= schedule.warmup_steps:
        return config
    shorter = schedule.model_copy(update={"warmup_steps": num_steps // _PARTS_OF_RUN})
    _log.info(
        "schedule.warmup_steps is %d instead of %d: the run has %d steps, so the learning rate would not reach its peak",
        *(shorter.warmup_steps, schedule.warmup_steps, num_steps),
    )
    return config.model_copy(update={"schedule": shorter})


@dataclass(frozen=True)
class _Length:
    epoch_rows: int | None  # rows after which `limits.epochs` ends the run
    certain_step: int | None  # for limits on steps and epochs; None if a limit on tokens may come first
    expected_steps: int  # the number of steps until the first of the limits on steps, epochs and tokens; 0 if none is set


def _length(config: TrainConfig, manifest: Manifest, num_rows: int) -> _Length:
    limits, batch_rows = config.limits, config.batch.global_batch_size
    # A decimal fraction: 1.1 epochs of 350 rows are 385 rows, and the product of floats is slightly more.
    epoch_rows = None if limits.epochs is None else math.ceil(Fraction(str(limits.epochs)) * num_rows)
    row_targets = sum(shard.targets for shard in manifest.shards if shard.split == "train") / num_rows
    counted = [limits.steps, None if epoch_rows is None else math.ceil(epoch_rows / batch_rows)]
    certain = [steps for steps in counted if steps is not None]
    estimated = [] if limits.tokens is None else [max(1, math.ceil(limits.tokens / row_targets / batch_rows))]
    certain_step = min(certain) if certain and limits.tokens is None else None
    return _Length(epoch_rows, certain_step, min(certain + estimated, default=0))
