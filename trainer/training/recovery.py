"""Goes back to an earlier step, after a fault or on request of the guard."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from common.errors import GuardError
from trainer.checkpoint.of_run import load_whole
from trainer.data.bad_shards import shared_faults
from trainer.distributed.group import LET_GO_S
from trainer.distributed.replica_check import ReplicaCheck
from trainer.machine.memory import release_memory
from trainer.parallel.accumulation import Accumulation
from trainer.runs.progress import Progress
from trainer.training.adjuster import Adjuster, smaller_batches
from trainer.training.reporter import GoBack, RepeatStep, Reporter, RollBack
from trainer.training.saver import Saver
from trainer.training.step_report import StepResult
from trainer.training.trainable import Trainable, make_scaler
from trainer.watchdog.heartbeat import Heartbeat

__all__ = ["Recovery"]

_log = logging.getLogger(__name__)


@dataclass
class Recovery:
    """Prepares the repetition of a void step, or restores a checkpoint."""

    trainable: Trainable
    saver: Saver
    reporter: Reporter
    adjuster: Adjuster
    replica_check: ReplicaCheck
    heartbeat: Heartbeat

    def go_back(self, request: GoBack) -> Progress:
        """Carry out the request, and return the counters from which training continues.

        Raises:
            ConfigError: a step ran out of memory, and smaller micro-batches are not possible: see `smaller_batches`.
            ProjectError: data cannot be read: see `Adjuster.quarantine`.
            GuardError: there is no checkpoint for the rollback.
        """
        self.reporter.observer.forget()
        if isinstance(request, RollBack):
            return self._roll_back(request)
        assert isinstance(request, RepeatStep)
        self.replica_check.drop_pending()
        self._remove_cause(request.result)
        facts = request.facts
        return facts.progress.before_step(start=facts.progress.rows - len(facts.rows), targets=facts.num_targets)

    def _remove_cause(self, result: StepResult) -> None:
        group, adjuster = self.trainable.context.group, self.adjuster
        self.heartbeat.expect_slow_steps()
        if result.data_votes:
            faults = {} if result.fault is None else {result.fault.shard: result.fault.error}
            found = shared_faults(faults, self.trainable.context.manifest, group)
            adjuster.make(adjuster.quarantine(found, faults, result.step))
        if result.memory_votes:
            adjuster.make(smaller_batches(adjuster.context, adjuster.adjustments, result.step))
            self._wrap_again(result.step)
        if group.is_main:
            reasons = "; ".join(adjustment.reason for adjustment in adjuster.adjustments.beginning_at(result.step))
            _log.warning("step %d is repeated: %s", result.step, reasons)

    def _wrap_again(self, step: int) -> None:
        """Replace the parts that a failed pass may have left incomplete. Weights and optimizers are unchanged."""
        trainable = self.trainable
        scaler = make_scaler(trainable.context)
        scaler.load_state_dict(trainable.scaler.state_dict())
        # Dropping DDP removes its hooks on the weights. Its destructor waits for its exchanges: see `trainer.distributed.group`.
        trainable.module, trainable.accumulation, trainable.scaler = trainable.loss, Accumulation(()), scaler
        time.sleep(LET_GO_S)
        release_memory()
        trainable.module, trainable.accumulation = self.adjuster.wrapped(trainable.loss, step)

    def _roll_back(self, request: RollBack) -> Progress:
        """Restore the newest checkpoint before the alert's step, and leave out the rows of the request from then on."""
        self.saver.finish()
        step = self.trainable.context.group.on_main(lambda: self._newest_before(request))
        checkpoint, state = load_whole(self.saver.checkpoints, step)
        self.trainable.restore(checkpoint, state)
        self.reporter.restore(state, rolled_back=True)
        self.replica_check.forget(step)
        self.reporter.rewind(state, request)
        # Save now, because a crash would lose the positions to leave out. Wait for it, because a save of a saved step does nothing.
        saved = self.saver.save(state.progress.leaving_out(request.first, request.end))
        self.saver.finish()
        return saved

    def _newest_before(self, request: RollBack) -> int:
        """Return the newest checkpoint that verifies. It is older than the alert's step: steps are judged before a save."""
        newest = self.saver.checkpoints.newest_verified()
        if newest is None:
            message = f"{request.alert.message}. Training stops, because there is no checkpoint before this step"
            self.reporter.monitor.alert(replace(request.alert, message=message, action="stop"))
            raise GuardError(message)
        return newest
