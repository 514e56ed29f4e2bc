"""What a machine has: cores of this process, and signs of a GPU. It imports the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

DEVICE_NODES = "dev/nvidia[0-9]*"
KERNEL_MODULE = "proc/driver/nvidia/gpus/*"
_WSL_DEVICE = "dev/dxg"  # Windows provides this device for GPUs of all vendors
_WSL_LIBRARIES = ("usr/lib/wsl/lib/libcuda.so*", "usr/lib/wsl/drivers/*/libcuda.so*")


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def signs_of_gpus(root: Path = Path("/")) -> list[str]:
    """Return the paths that exist only on a machine with an NVIDIA GPU, whether or not torch sees it, device nodes first."""
    found = [*sorted(root.glob(DEVICE_NODES)), *sorted(root.glob(KERNEL_MODULE))]
    if (device := root / _WSL_DEVICE).exists() and any(any(root.glob(pattern)) for pattern in _WSL_LIBRARIES):
        found.append(device)
    return list(map(str, found))
