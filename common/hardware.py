"""What a machine has: cores of this process, signs of a GPU, and why a GPU is slow. It imports the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

DEVICE_NODES = "dev/nvidia[0-9]*"
KERNEL_MODULE = "proc/driver/nvidia/gpus/*"
_WSL_DEVICE = "dev/dxg"  # Windows provides this device for GPUs of all vendors
_WSL_LIBRARIES = ("usr/lib/wsl/lib/libcuda.so*", "usr/lib/wsl/drivers/*/libcuda.so*")
_THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
"""Names of the bits of NVML's clocks event reasons (nvml.h)."""


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def signs_of_gpus(root: Path = Path("/")) -> list[str]:
    """Return the paths that exist only on a machine with an NVIDIA GPU, whether or not torch sees it, device nodes first."""
    found = [*sorted(root.glob(DEVICE_NODES)), *sorted(root.glob(KERNEL_MODULE))]
    if (device := root / _WSL_DEVICE).exists() and any(any(root.glob(pattern)) for pattern in _WSL_LIBRARIES):
        found.append(device)
    return list(map(str, found))


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the bits that are set, lowest first. A bit without a name is `0x…`."""
    named = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(_THROTTLE_REASONS.get(bit, f"{bit:#x}") for bit in named)
