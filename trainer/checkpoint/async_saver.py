"""Saving in the background: training hands over a checkpoint and goes on; what goes wrong is told at the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.errors import StorageError
from common.storage_errors import explain_os_error
from trainer.checkpoint.store import Checkpoint

__all__ = ["AsyncSaver"]


class AsyncSaver:
    """Runs `save` in a thread, one checkpoint at a time.

    Its methods are for one thread, that of the training loop. The saving thread keeps the interpreter alive until it is
    done, so that a program that ends still completes its last checkpoint.
    """

    def __init__(self, save: Callable[[Checkpoint], object]) -> None:
        self._save = save
        self._job: _Job | None = None
        self._failure: BaseException | None = None
        self._acknowledged_step = -1

    @property
    def acknowledged_step(self) -> int:
        """The step whose save returned last, -1 where there is none yet; an earlier step than before where training went back."""
        self._collect()
        return self._acknowledged_step

    @property
    def failed(self) -> bool:
        """True when a save has failed and nobody has been told; does not wait."""
        self._collect()
        return self._failure is not None

    def submit(self, checkpoint: Checkpoint) -> None:
        """Begins to save; waits for an earlier save first.

        Nothing is copied: the tensors must be on the CPU, and nobody may change them until this save is acknowledged.

        Raises:
            StorageError, or what the earlier save raised: it failed; this one was not begun.
        """
        self.wait()
        self._job = _Job(self._save, checkpoint)
        self._job.start()

    def raise_if_failed(self) -> None:
        """Raises what a save failed with, once; does not wait for one that is running.

        Raises:
            StorageError: a file could not be written, or the thread died. Other errors are raised as they are.
        """
        self._collect()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Waits for the save that is running and raises what it failed with."""
        if self._job is not None:
            self._job.join()
        self.raise_if_failed()

    def _collect(self) -> None:
        """Takes the outcome of a thread that has ended, in whatever way."""
        if self._job is None or self._job.is_alive():
            return
        job, self._job = self._job, None
        if job.done:
            self._acknowledged_step = job.checkpoint.step
        else:
            self._failure = _failure(job, self._acknowledged_step)


class _Job(threading.Thread):
    """One save and its outcome; that it is done is noted last, so that a thread that dies anywhere has failed."""

    def __init__(self, save: Callable[[Checkpoint], object], checkpoint: Checkpoint) -> None:
        super().__init__(name=f"checkpoint-{checkpoint.step}", daemon=False)
        self.checkpoint = checkpoint
        self.error: BaseException | None = None
        self.done = False
        self._save = save

    def run(self) -> None:
        try:
            self._save(self.checkpoint)
            self.done = True
        except BaseException as error:  # a thread that ends by SystemExit would end silently
            self.error = error


def _failure(job: _Job, acknowledged_step: int) -> BaseException:
    where = f"the checkpoint of step {job.checkpoint.step} could not be saved"
    last = f"the last saved step is {acknowledged_step}" if acknowledged_step >= 0 else "none was saved since the start"
    if isinstance(job.error, Exception) and not isinstance(job.error, OSError):
        return job.error
    if isinstance(job.error, OSError):
        reason = f"{where}: {explain_os_error(job.error)}"
    else:
        ended = f"ended by {job.error!r}" if job.error else "died"
        reason = f"{where}: the saving thread {ended}; run the same command again"
    failure = StorageError(f"{reason}; {last}")
    failure.__cause__ = job.error
    return failure
