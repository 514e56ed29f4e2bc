"""Memory of a process and its device: used, free, and run out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from common.host_memory import available_host_bytes, process_bytes

__all__ = ["PeakMeter", "available_bytes", "is_out_of_memory", "isolated_rng", "release_memory"]

USABLE_SHARE = 0.9
"""Share of the free memory that is planned with; the rest is for the allocator's gaps and what the model leaves out."""
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """True where an allocation failed, on a GPU or on the host, and a smaller one might not; also as the cause of another error."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
    return said or is_out_of_memory(error.__cause__)


def release_memory() -> None:
    """Gives what no tensor holds any more back to the device, so that other sizes fit in."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU is in use


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leaves torch's generators, of the CPU and of this process's GPU, as they were before the body, also where it raises."""
    host = torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking a GPU that is not in use would start it
    device = torch.cuda.get_rng_state() if in_use else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


@dataclass(frozen=True)
class PeakMeter:
    """Measures the most memory that was in use since it was made; to be made before the model is.

    On a GPU that is what tensors held. On the CPU it is what the process held beyond what it held at the start; where the
    kernel does not let a process reset its own peak, an earlier peak counts too.
    """

    device: torch.device
    resident_before: int
    """Bytes that the process held at the start, on the CPU."""

    @classmethod
    def start(cls, device: torch.device) -> PeakMeter:
        """Forgets earlier peaks."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device, 0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return cls(device, process_bytes("VmRSS"))

    def bytes(self) -> int:
        """The peak until now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, process_bytes("VmHWM") - self.resident_before)


def available_bytes(device: torch.device, num_local_ranks: int) -> int:
    """Memory that this rank may still take: what is free on its GPU, or its part of what the container has left.

    Args:
        device: of this rank.
        num_local_ranks: ranks on this machine, which share the host's memory.
    """
    if device.type != "cuda":
        return available_host_bytes() // num_local_ranks
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
