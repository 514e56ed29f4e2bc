"""Saving in the background: training hands over a checkpoint and continues. An error is raised at the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

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


_ALIGNMENT = 64
_PAGE_BYTES = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


class Staging:
    """Memory that a thread provides at the start of a run, and that all saves use, one at a time.

    A copy of 351 MB takes 18 ms of CPU. Into new memory it took 32 to 610 ms in huge pages, which the kernel may first have to
    clear of other data, and 139 ms in small pages (one thread, Intel, November 2026).
    """

    def __init__(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        pool = ThreadPoolExecutor(1, "staging")
        self._buffers = pool.submit(_allocate, groups)
        pool.shutdown(wait=False)

    def of(self, group: str) -> Mapping[str, Tensor]:
        """Return memory for the whole tensors of a group. Raises the error of its allocation."""
        return self._buffers.result().get(group, {})


def _allocate(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    memory = torch.empty(sum(_aligned_bytes(one) for group in groups.values() for one in group.values()), dtype=torch.uint8)
    memory.numpy()[::_PAGE_BYTES] = 0  # makes the system provide the pages
    if any(one.is_cuda for group in groups.values() for one in group.values()):
        # Not `pin_memory`, which rounds the size up to a power of two. If it fails, the copies are correct, but slower.
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)  # type: ignore[no-untyped-call]
    buffers: dict[str, dict[str, Tensor]] = {}
    end = 0
    for name, group in groups.items():
        buffers[name] = {}
        for key, tensor in group.items():
            begin, end = end, end + _aligned_bytes(tensor)
            content = memory[begin : begin + tensor.numel() * tensor.itemsize]
            buffers[name][key] = content.view(tensor.dtype).view(tensor.shape)
    return buffers


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
