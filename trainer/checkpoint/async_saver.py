"""Saving in the background: training hands over a checkpoint and continues. An error is raised at the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.errors import StorageError
from common.storage_errors import explain_os_error
from trainer.checkpoint.store import Checkpoint


class AsyncSaver:
    """Runs `save` in a thread, one checkpoint at a time. Only the training loop's thread may call its methods."""

    def __init__(self, save: Callable[[Checkpoint], object]) -> None:
        self._save = save
        self._job: _Job | None = None
        self._failure: BaseException | None = None
        self._acknowledged_step = -1

    @property
    def acknowledged_step(self) -> int:
        """The step whose save returned last, or -1 if none has returned. It decreases after a rollback."""
        self._collect()
        return self._acknowledged_step

    @property
    def failed(self) -> bool:
        """True if a save has failed and its error has not been raised yet. Does not wait."""
        self._collect()
        return self._failure is not None

    def submit(self, checkpoint: Checkpoint) -> None:
        """Wait for the earlier save and raise its error, else start this one. The CPU tensors must not change until its end."""
        self.wait()
        self._job = _Job(self._save, checkpoint)
        self._job.start()

    def raise_if_failed(self) -> None:
        """Raise the error of a failed save, once. Does not wait for a running save."""
        self._collect()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the running save and raise its error if it failed."""
        if self._job is not None:
            self._job.join()
        self.raise_if_failed()

    def _collect(self) -> None:
        if self._job is None or self._job.is_alive():
            return
        job, self._job = self._job, None
        if job.done:
            self._acknowledged_step = job.checkpoint.step
        else:
            self._failure = _failure(job, self._acknowledged_step)


class _Job(threading.Thread):
    """One save and its result. `done` is set last, so a thread that dies at any point counts as failed."""

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
        except BaseException as error:  # SystemExit would end the thread silently
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
