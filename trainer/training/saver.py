"""The state of a run: guard, training losses and ledger besides the tensors. Saves it in the background, and keeps the checkpoints
that the settings ask for.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.storage_errors import naming
from trainer.checkpoint.async_saver import AsyncSaver, Staging
from trainer.checkpoint.of_run import check_finite
from trainer.checkpoint.store import Checkpoint, CheckpointStore, link_checkpoint, steps_to_keep
from trainer.config import CheckpointConfig
from trainer.distributed.group import Group
from trainer.distributed.replica_check import ReplicaCheck
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.metrics.monitor import Monitor
from trainer.metrics.run_status import RunStatus
from trainer.runs.events import AlertEvent
from trainer.runs.ledger import Ledger
from trainer.runs.metrics_file import CutOff
from trainer.runs.state import Progress, RunState
from trainer.training.run_end import RunEnd
from trainer.training.step import StepResult
from trainer.training.trainable import Trainable
from trainer.watchdog.heartbeat import HeartbeatWriter

_log = logging.getLogger(__name__)
_FOR_HOOKS = ".saved"  # name of the folder in the run in which `on_save` finds a checkpoint


@dataclass
class LiveState:
    group: Group
    guard: Guard
    ledger: Ledger | None  # None on all ranks except rank 0
    monitor: Monitor
    ending: RunStatus
    train_losses: LossMean = field(default_factory=LossMean)  # the training losses since the last evaluation

    def at(self, progress: Progress, scaler: Mapping[str, Any]) -> RunState:
        head = None if self.ledger is None else self.ledger.head
        return RunState(progress, dict(scaler), self.guard.state, self.train_losses.state, head)

    def resume(self, state: RunState) -> None:
        self.train_losses = LossMean(state.train_losses)
        self.guard.restore(state.guard)

    def roll_back(self, state: RunState, alert: AlertEvent, first: int, end: int) -> None:
        """Go back to a state, and note in the ledger that the positions from `first` to before `end` are left out.

        All later steps are removed from sinks and ledger. The guard keeps its count of rollbacks, and nothing else.
        """
        step = state.progress.step
        self.train_losses = LossMean(state.train_losses)
        self.guard.after_rollback(state.guard)
        self.monitor.rewind(CutOff(step, evaluated=state.known.evaluated))
        self.monitor.alert(replace(alert, step=step))

        def note() -> None:
            assert self.ledger is not None
            assert state.ledger is not None
            self.ending.reached(step)
            self.ledger.rewind(state.ledger)
            self.ledger.event("skip", step=step, start=first, count=end - first, reason=alert.message)

        self.group.on_main(note)


@dataclass
class Saver:
    trainable: Trainable
    state: LiveState
    end: RunEnd
    replica_check: ReplicaCheck
    checkpoints: CheckpointStore
    settings: CheckpointConfig
    writer: AsyncSaver  # writes checkpoints in a thread of rank 0
    staging: Staging  # empty on all ranks except rank 0
    saved: tuple[int, int] | None
    """Step and last evaluation of the newest checkpoint, written or being written, None if there is none. Equal on all ranks."""
    submitted: dict[int, Progress] = field(default_factory=dict)  # counters of the checkpoints that are being written, by step

    def is_saved(self, progress: Progress) -> bool:
        return self.saved == (progress.step, progress.evaluated_step)

    def due(self, progress: Progress) -> bool:
        at_end = self.end.finished(progress)
        if self.is_saved(progress) or (progress.step == 0 and not at_end):
            return False
        return (
            progress.step % self.settings.every_steps == 0
            or progress.seconds - progress.saved_seconds >= self.settings.every_minutes * 60
            or progress.step == progress.best_step
            or at_end
        )

    def save(self, progress: Progress) -> Progress:
        """Copy the whole state and start to write it. Training waits for the copy, and for an earlier save, and raises its error.
        Raises GuardError if the weights of the ranks differ.
        """
        begin = time.monotonic()
        self.replica_check.check(progress.step)
        saved = replace(progress, saved_seconds=progress.seconds)
        self.state.group.on_main(self.writer.wait)  # it reads the memory of `staging`
        checkpoint = self.trainable.checkpoint(self.state.at(saved, self.trainable.scaler.state_dict()), self.staging)

        def submit() -> None:
            assert self.state.ledger is not None  # rank 0 has it
            self.state.ledger.sync()  # before a checkpoint refers to ledger and metrics
            self.state.monitor.sync()
            self.writer.submit(checkpoint)

        self.state.group.on_main(submit)
        self.saved = saved.step, saved.evaluated_step
        self.submitted[saved.step] = saved
        self.state.monitor.saving(saved.step, time.monotonic() - begin)
        return saved

    def follow(self, result: StepResult) -> None:
        """Acknowledge the saves that rank 0 has completed. If one failed, raise its error on every rank."""
        if result.save_failed:
            self.state.group.on_main(self.writer.raise_if_failed)
        self._acknowledge(result.acknowledged_step)

    def finish(self) -> None:
        """Wait for the running save. If it failed, raise its error on every rank."""

        def wait() -> int:
            self.writer.wait()
            return self.writer.acknowledged_step

        self._acknowledge(self.state.group.on_main(wait))

    def _acknowledge(self, newest: int) -> None:
        for step in sorted(step for step in self.submitted if step <= newest):
            view = self.trainable.view(self.submitted.pop(step))
            if "on_save" not in self.trainable.extension.hooks:
                continue
            group, folder = self.state.group, view.config.run / _FOR_HOOKS
            whole = group.on_main(partial(link_checkpoint, self.checkpoints.path(step), folder))
            if whole is None:
                continue
            try:
                self.state.monitor.write(self.trainable.extension.notify("on_save", view, step, whole))
                group.smallest(0)  # other ranks may still read the folder
            finally:
                if group.is_main:
                    shutil.rmtree(folder, ignore_errors=True)


def write_and_keep(checkpoints: CheckpointStore, settings: CheckpointConfig, checkpoint: Checkpoint) -> None:
    check_finite(checkpoint)
    with naming(checkpoints.directory):
        checkpoints.save(checkpoint)
    best = checkpoint.state["progress"]["best_step"]
    checkpoints.retain(steps_to_keep(checkpoints.steps(), last=settings.keep_last, every=settings.keep_every, best=best))


def let_finish(writer: AsyncSaver, heartbeat: HeartbeatWriter) -> None:
    heartbeat.at("save")
    try:
        writer.wait()
    except Exception as error:
        _log.error("%s", error)
