"""Saves the state of a run in the background."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field, replace

from trainer.checkpoint import AsyncSaver, Checkpoint, CheckpointStore
from trainer.checkpoint.complete_folder import link_checkpoint
from trainer.checkpoint.weights import check_finite
from trainer.distributed.replica_check import ReplicaCheck
from trainer.extensions.hooks import RunView
from trainer.runs.limits import Plan
from trainer.runs.progress import Progress
from trainer.training.reporter import Reporter
from trainer.training.step_report import StepResult
from trainer.training.trainable import Trainable

__all__ = ["Saver"]

_FOR_HOOKS = ".saved"
"""Name of the folder in the run in which `on_save` finds a checkpoint."""


@dataclass
class Saver:
    """Saves every so many steps or minutes, at a new lowest validation loss, and at the end."""

    trainable: Trainable
    reporter: Reporter
    limits: Plan
    replica_check: ReplicaCheck
    checkpoints: CheckpointStore
    writer: AsyncSaver
    """Writes checkpoints in a thread of rank 0."""
    saved_step: int | None
    """Step of the checkpoint that holds the current state, written or being written, None if there is none. Equal on all ranks."""
    submitted: dict[int, Progress] = field(default_factory=dict)
    """Counters of the checkpoints that are being written, by step."""

    def due(self, progress: Progress) -> bool:
        """Return True if a save is due at this step and the state is not saved yet."""
        at_end = self.limits.finished(progress)
        if self.saved_step == progress.step or (progress.step == 0 and not at_end):
            return False
        settings = self.trainable.context.config.checkpoint
        return (
            progress.step % settings.every_steps == 0
            or progress.seconds - progress.saved_seconds >= settings.every_minutes * 60
            or progress.step == progress.best_step
            or at_end
        )

    def save(self, progress: Progress) -> Progress:
        """Copy the whole state and start to write it. Training waits for the copy, and for an earlier save.

        Raises:
            StorageError: an earlier save failed; raised on every rank.
            GuardError: the weights of the ranks differ, or are not finite.
        """
        begin = time.monotonic()
        self.replica_check.check(progress.step)
        saved = replace(progress, saved_seconds=progress.seconds)
        checkpoint = self.trainable.checkpoint(self.reporter.state(saved, self.trainable.scaler.state_dict()))
        self.trainable.context.group.on_main(lambda: self._submit(checkpoint))
        self.saved_step = saved.step
        self.submitted[saved.step] = saved
        self.reporter.monitor.saving(saved.step, time.monotonic() - begin)
        return saved

    def follow(self, result: StepResult) -> None:
        """Acknowledge the saves that rank 0 has completed, as the result of a step says.

        Raises:
            StorageError: a save failed; raised on every rank.
        """
        if result.save_failed:
            self.trainable.context.group.on_main(self.writer.raise_if_failed)
        self._acknowledge(result.acknowledged_step)

    def finish(self) -> None:
        """Wait for the running save. If it failed, raise its error on every rank."""

        def wait() -> int:
            self.writer.wait()
            return self.writer.acknowledged_step

        self._acknowledge(self.trainable.context.group.on_main(wait))

    def _submit(self, checkpoint: Checkpoint) -> None:
        check_finite(checkpoint)
        self.reporter.sync()
        self.writer.submit(checkpoint)

    def _acknowledge(self, newest: int) -> None:
        for step in sorted(step for step in self.submitted if step <= newest):
            view = self.trainable.view(self.submitted.pop(step))
            if self.trainable.extension.copies:
                self._call_hook(view, step)

    def _call_hook(self, view: RunView, step: int) -> None:
        """Call the hook for a checkpoint, unless the checkpoint was deleted in the meantime."""
        group, extension = self.trainable.context.group, self.trainable.extension
        folder = view.config.run / _FOR_HOOKS
        whole = group.on_main(lambda: link_checkpoint(self.checkpoints.path(step), folder))
        if whole is None:
            return
        try:
            self.reporter.monitor.scalars(extension.saved(view, step, whole))
            group.smallest(0)  # other ranks may still read the folder
        finally:
            if group.is_main:
                shutil.rmtree(folder, ignore_errors=True)
