"""What a machine has for this process: cores, memory, whether the kernel has killed processes for lack of it, and signs of GPUs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.text import format_bytes, size

_WEIGHT_BYTES = 4
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    limit: str
    usage: str
    inactive: str
    kills: str


_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")
_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_NO_LIMIT = 1 << 60  # version 1 shows a cgroup without a limit as a number near 2^63


def available_host_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that are free in the system or the cgroups of this process. Inactive cached files count as free."""
    rooms = [_field(proc / "meminfo", "MemAvailable:") * 1024]
    for directory, files in _memory_cgroups(proc, cgroups):
        with suppress(OSError, ValueError):
            most = int((directory / files.limit).read_text(encoding="ascii"))  # ValueError for "max", which is no limit
            used = int((directory / files.usage).read_text(encoding="ascii"))
            rooms.append(max(0, most - max(0, used - _field(directory / "memory.stat", files.inactive))))
    return min(rooms)


def free_host_bytes() -> float:
    """Infinite if the platform is not Linux."""
    return available_host_bytes() if sys.platform == "linux" else math.inf


def check_fits_memory(num_weights: int) -> None:
    if num_weights * _WEIGHT_BYTES > (free := free_host_bytes()):
        raise ConfigError(
            f"the model has {num_weights} weights, which take {format_bytes(num_weights * _WEIGHT_BYTES)}, and "
            f"{format_bytes(int(free))} of memory are free; use a smaller model or a machine with more memory"
        )


def num_oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return how many processes in the cgroup of this process the kernel has killed for lack of memory; 0 if unknown."""
    for directory, files in _memory_cgroups(proc, cgroups):
        with suppress(OSError, ValueError):
            return _field(directory / files.kills, "oom_kill")
    return 0


def why_killed(oom_kills_before: int, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> str:
    """Return why the kernel has killed a process since `num_oom_kills` was `oom_kills_before`, with advice; empty if it has not."""
    if num_oom_kills(proc, cgroups) <= oom_kills_before:
        return ""
    limits = []
    for directory, files in _memory_cgroups(proc, cgroups):
        with suppress(OSError, ValueError):
            limits.append(int((directory / files.limit).read_text(encoding="ascii")))
    if min(limits, default=_NO_LIMIT) >= _NO_LIMIT:
        return "the memory of this machine is used up"
    return f"the memory limit of {size(min(limits))} is used up; raise it (Compose: MEMORY_LIMIT, Kubernetes: limits, Slurm: --mem)"


def _memory_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folder of each memory cgroup, from the one of this process up to the root, for versions 2 and 1."""
    lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines() if (proc / "self/cgroup").exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (cgroups / "memory", _VERSION_1) if controllers else (cgroups, _VERSION_2)
        # Inside a container the path is often that of the host, while the cgroup of the container is mounted at the root.
        relative = Path(path.strip("/"))
        for directory in (root / relative, *(root / parent for parent in relative.parents)):
            yield directory, files


def process_bytes(name: str) -> int:
    """Return a value of `/proc/self/status`, such as `VmHWM`."""
    return _field(Path("/proc/self/status"), f"{name}:") * 1024


def _field(path: Path, name: str) -> int:
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{path} has no line for {name}")


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
HARMFUL_REASONS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""Those that are a fault of cooling or power supply. A GPU at its power cap works as designed."""


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
