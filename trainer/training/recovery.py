"""Lets the guard judge each step, and goes back to an earlier step on its request or after a fault."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from common.errors import GuardError
from trainer.checkpoint.of_run import load_whole
from trainer.data.bad_shards import shared_faults
from trainer.distributed.group import TEARDOWN_DELAY_S
from trainer.health.guard import guard_alert
from trainer.machine.memory import release_memory
from trainer.metrics.sinks.base import StepFacts
from trainer.runs.events import AlertEvent
from trainer.runs.state import Progress
from trainer.training.adjuster import smaller_batches
from trainer.training.step import StepResult
from trainer.training.training_run import TrainingRun

_log = logging.getLogger(__name__)


class GoBack(Exception):  # noqa: N818 - a request, no error
    """A request to continue from an earlier step. Raised on every rank in the same step."""


class RollBack(GoBack):
    """A request of the guard to go back to a checkpoint before the alert's step, and to leave out the positions [first, end)."""

    def __init__(self, alert: AlertEvent, first: int, end: int) -> None:
        super().__init__(alert.message)
        self.alert, self.first, self.end = alert, first, end


class RepeatStep(GoBack):
    """A request to repeat a void step on the same rows. A rank had no memory or no data."""

    def __init__(self, result: StepResult, facts: StepFacts) -> None:
        super().__init__()
        self.result, self.facts = result, facts


def judge(run: TrainingRun, result: StepResult, facts: StepFacts) -> None:
    """Let the guard judge a step, and alert if a rule is broken. Raises GuardError or RollBack if that is the verdict."""
    guard, monitor, config = run.state.guard, run.state.monitor, run.context.config.guard
    verdict = guard.judge(result.step, result.loss, result.grad_norm)
    if verdict.rule is None:
        return
    alert = guard_alert(verdict, result.step, result.loss, result.grad_norm, config)
    if verdict.is_news and verdict.action != "rollback":
        monitor.alert(alert)
    first, end = facts.progress.rows - len(facts.rows), facts.progress.rows
    if verdict.action == "stop":
        raise GuardError(f"{verdict.message}. The rows of this step are at positions {first} to {end - 1} of the order")
    if verdict.action == "rollback":
        raise RollBack(alert, first, max(end, first + config.window_steps * len(facts.rows)))


def go_back(run: TrainingRun, request: GoBack) -> Progress:
    run.observer.forget()
    if isinstance(request, RollBack):
        return _roll_back(run, request)
    assert isinstance(request, RepeatStep)
    run.replica_check.drop_pending()
    run.heartbeat.expect_slow_steps()
    adjuster, context, result, facts = run.adjuster, run.context, request.result, request.facts
    if result.data_votes:
        faults = {} if result.fault is None else {result.fault.shard: result.fault.error}
        adjuster.quarantine(shared_faults(faults, context.manifest, context.group), faults, result.step)
    if result.memory_votes:
        adjuster.make(smaller_batches(context, adjuster.adjustments, result.step))
        run.trainable.unwrap()
        time.sleep(TEARDOWN_DELAY_S)
        release_memory()
        run.trainable.module, run.trainable.accumulation = adjuster.wrapped(run.trainable.loss, result.step)
    if context.group.is_main:
        reasons = "; ".join(adjustment.reason for adjustment in adjuster.adjustments.beginning_at(result.step))
        _log.warning("step %d is repeated: %s", result.step, reasons)
    return facts.progress.before_step(start=facts.progress.rows - len(facts.rows), targets=facts.num_targets)


def _roll_back(run: TrainingRun, request: RollBack) -> Progress:
    def newest_verified() -> int:
        newest = run.saver.checkpoints.newest_verified()  # older than the alert's step: steps are judged before a save
        if newest is None:
            message = f"{request.alert.message}. Training stops, because there is no checkpoint before this step"
            run.state.monitor.alert(replace(request.alert, message=message, action="stop"))
            raise GuardError(message)
        return newest

    run.saver.finish()
    step = run.context.group.on_main(newest_verified)
    checkpoint, state = load_whole(run.saver.checkpoints, step)
    run.trainable.restore(checkpoint, state)
    run.replica_check.forget(step)
    run.state.roll_back(state, request.alert, request.first, request.end)
    # Save now, because a crash would lose the positions to leave out. Wait for it, because a save of a saved step does nothing.
    saved = run.saver.save(state.progress.leaving_out(request.first, request.end))
    run.saver.finish()
    return saved
