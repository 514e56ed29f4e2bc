"""Goes back to an earlier step, after a fault or on request of the guard."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from common.errors import GuardError
from trainer.checkpoint.of_run import load_whole
from trainer.data.bad_shards import shared_faults
from trainer.distributed.group import TEARDOWN_DELAY_S
from trainer.distributed.replica_check import ReplicaCheck
from trainer.machine.memory import release_memory
from trainer.metrics import StepFacts
from trainer.metrics.layers import LayerObserver
from trainer.runs.events import AlertEvent
from trainer.runs.progress import Progress
from trainer.training.adjuster import Adjuster, smaller_batches
from trainer.training.saver import LiveState, Saver
from trainer.training.step_report import StepResult
from trainer.training.trainable import Trainable
from trainer.watchdog.heartbeat import HeartbeatWriter

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


@dataclass(frozen=True)
class Recovery:
    trainable: Trainable
    saver: Saver
    state: LiveState
    adjuster: Adjuster
    observer: LayerObserver
    replica_check: ReplicaCheck
    heartbeat: HeartbeatWriter

    def go_back(self, request: GoBack) -> Progress:
        self.observer.forget()
        if isinstance(request, RollBack):
            return self._roll_back(request)
        assert isinstance(request, RepeatStep)
        self.replica_check.drop_pending()
        self._remove_cause(request.result)
        facts = request.facts
        return facts.progress.before_step(start=facts.progress.rows - len(facts.rows), targets=facts.num_targets)

    def _remove_cause(self, result: StepResult) -> None:
        adjuster, group = self.adjuster, self.state.group
        self.heartbeat.expect_slow_steps()
        if result.data_votes:
            faults = {} if result.fault is None else {result.fault.shard: result.fault.error}
            found = shared_faults(faults, adjuster.context.manifest, group)
            adjuster.make(adjuster.quarantine(found, faults, result.step))
        if result.memory_votes:
            adjuster.make(smaller_batches(adjuster.context, adjuster.adjustments, result.step))
            self.trainable.unwrap()
            time.sleep(TEARDOWN_DELAY_S)
            release_memory()
            self.trainable.wrap(*adjuster.wrapped(self.trainable.loss, result.step))
        if group.is_main:
            reasons = "; ".join(adjustment.reason for adjustment in adjuster.adjustments.beginning_at(result.step))
            _log.warning("step %d is repeated: %s", result.step, reasons)

    def _roll_back(self, request: RollBack) -> Progress:
        self.saver.finish()
        step = self.state.group.on_main(lambda: self._newest_before(request))
        checkpoint, state = load_whole(self.saver.checkpoints, step)
        self.trainable.restore(checkpoint, state)
        self.replica_check.forget(step)
        self.state.roll_back(state, request.alert, request.first, request.end)
        # Save now, because a crash would lose the positions to leave out. Wait for it, because a save of a saved step does nothing.
        saved = self.saver.save(state.progress.leaving_out(request.first, request.end))
        self.saver.finish()
        return saved

    def _newest_before(self, request: RollBack) -> int:
        """Return the newest checkpoint that verifies. It is older than the alert's step: steps are judged before a save."""
        newest = self.saver.checkpoints.newest_verified()
        if newest is None:
            message = f"{request.alert.message}. Training stops, because there is no checkpoint before this step"
            self.state.monitor.alert(replace(request.alert, message=message, action="stop"))
            raise GuardError(message)
        return newest
