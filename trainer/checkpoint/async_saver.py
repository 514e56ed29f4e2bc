"""Saving in the background: training hands over a checkpoint and continues. An error is raised at the next step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from common.errors import StorageError
from common.storage_errors import explain_os_error
from trainer.checkpoint.store import Checkpoint

_AGAIN = "run the same command again"


class AsyncSaver:
    """Runs `save` in a thread, one checkpoint at a time. Only the training loop's thread may call its methods."""

    def __init__(self, save: Callable[[Checkpoint], object]) -> None:
        self._save = save
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._running: tuple[int, Future[object]] | None = None  # the step of a save, and the save
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
        self._running = checkpoint.step, self._pool.submit(self._save, checkpoint)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed save, once. Does not wait for a running save."""
        self._collect()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the running save and raise its error if it failed."""
        if self._running is not None:
            wait([self._running[1]])
        self.raise_if_failed()

    def _collect(self) -> None:
        if self._running is None or not self._running[1].done():
            return
        (step, save), self._running = self._running, None
        error = save.exception()
        if error is None:
            self._acknowledged_step = step
            return
        self._failure = error
        if isinstance(error, OSError) or not isinstance(error, Exception):
            where = f"the checkpoint of step {step} could not be saved"
            reason = explain_os_error(error) if isinstance(error, OSError) else f"the saving thread ended by {error!r}; {_AGAIN}"
            acknowledged = self._acknowledged_step
            last = f"the last saved step is {acknowledged}" if acknowledged >= 0 else "none was saved since the start"
            self._failure = StorageError(f"{where}: {reason}; {last}")
            self._failure.__cause__ = error
