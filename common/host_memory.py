"""How much host memory this process may still use, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_host_bytes", "process_bytes"]


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that are free in the system or in the cgroups of this process, whichever is less.

    A cgroup counts its cached files as used. The kernel drops inactive ones when memory is short, so they count as free here.
    """
    return min([_field(proc / "meminfo", "MemAvailable:") * 1024, *_cgroup_rooms(proc, cgroups)])


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the free bytes of each limited cgroup, from the one of this process up to the root, for versions 2 and 1."""
    lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines() if (proc / "self/cgroup").exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, inactive = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            inactive = "total_inactive_file"
        else:
            continue
        # Inside a container the path is often that of the host, while the cgroup of the container is mounted at the root.
        relative = Path(path.strip("/"))
        for directory in (root / relative, *(root / parent for parent in relative.parents)):
            with suppress(OSError, ValueError):
                most = int((directory / limit).read_text(encoding="ascii"))  # without a limit: "max", or a number near 2^63
                used = int((directory / usage).read_text(encoding="ascii"))
                yield max(0, most - max(0, used - _field(directory / "memory.stat", inactive)))


def process_bytes(name: str) -> int:
    """Return a value of this process from `/proc/self/status`, such as `VmHWM`, in bytes."""
    return _field(Path("/proc/self/status"), f"{name}:") * 1024


def _field(path: Path, name: str) -> int:
    """Return the number after a name in a file of lines "name number …". Raises ValueError if no line has the name."""
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{path} has no line for {name}")
