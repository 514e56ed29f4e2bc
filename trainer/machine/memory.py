"""Memory of a process and its device: used, free, and out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from common.hardware import available_host_bytes, process_bytes

USABLE_SHARE = 0.9  # Share of the free memory that a run plans to use. The rest covers fragmentation and errors of the estimate.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # of cublasCreate, which finds no memory for its workspace
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed on a GPU or on the host, also as the cause of the error."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # After an error of NCCL its communicator cannot be used again, even if it only found no memory, and peers may wait in it.
    if isinstance(error, dist.DistBackendError) or "NCCL" in str(error):
        return False
    matches = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
    return matches or is_out_of_memory(error.__cause__)


def fits_in_memory(run: Callable[[], object]) -> bool:
    """Call a function. False: it ran out of memory. The error is freed then, with the tensors that its traceback holds."""
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if no GPU is in use


@contextmanager
def isolated_rng() -> Iterator[None]:
    host = torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # querying an unused GPU would initialise it
    device = torch.cuda.get_rng_state() if in_use else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


class PeakMeter:
    """Measures the peak memory since it was created. Create it before the model.

    On a GPU this is the memory of tensors. On the CPU it is the growth of the process since the start. If the kernel does not let a
    process reset its peak, an earlier peak counts too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._resident_before = process_bytes("VmRSS")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, process_bytes("VmHWM") - self._resident_before)


def available_bytes(device: torch.device, num_local_ranks: int) -> int:
    """Return the bytes that this rank may still allocate: the free memory of its GPU, or its share of that of the host."""
    if device.type != "cuda":
        return available_host_bytes() // num_local_ranks
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
