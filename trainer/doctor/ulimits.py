"""Checks of what the kernel allows this process: shared memory, open files, locked memory, stack. Standard library alone."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.text import format_bytes
from trainer.doctor.check import Check, Severity, check

__all__ = ["NEEDED_SHM_BYTES", "UNLIMITED", "Ulimits", "check_ulimits", "check_shared_memory", "read_ulimits"]

UNLIMITED = -1
_SHM = Path("/dev/shm")
NEEDED_SHM_BYTES = 1 << 30
"""NVIDIA's advice for containers with NCCL (NCCL user guide, "Shared memory"). Docker's default is 64 MiB."""
_NEEDED_FILES = 4096
_NEEDED_STACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Ulimits:
    """Limits of this process; `UNLIMITED` if there is none."""

    shm_bytes: int | None
    """Size of /dev/shm, None if there is none."""
    shm_free_bytes: int | None
    open_files: int
    """The hard limit, because a training raises its own limit to it."""
    locked_bytes: int
    stack_bytes: int


def read_ulimits(shm: Path = _SHM) -> Ulimits:
    """Return the limits of this process."""
    total: int | None = None
    free: int | None = None
    with suppress(OSError):
        status = os.statvfs(shm)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return Ulimits(
        total,
        free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        stack_bytes=resource.getrlimit(resource.RLIMIT_STACK)[0],
    )


@check("limits", "machine")
def check_ulimits(ulimits: Ulimits, *, num_gpus: int, num_nodes: int, has_peer_access: bool | None = None) -> list[Check]:
    """Return one row for each limit."""
    return [
        check_shared_memory(ulimits, num_gpus=num_gpus, has_peer_access=has_peer_access),
        _open_files(ulimits.open_files),
        _locked_memory(ulimits.locked_bytes, over_network=num_nodes > 1 and num_gpus > 0),
        _stack(ulimits.stack_bytes),
    ]


def check_shared_memory(ulimits: Ulimits, *, num_gpus: int, has_peer_access: bool | None = None) -> Check:
    """Return the row of /dev/shm, through which NCCL connects GPUs that cannot access each other's memory."""
    total, free = ulimits.shm_bytes, ulimits.shm_free_bytes
    needed = f"{format_bytes(NEEDED_SHM_BYTES)} free for several GPUs"
    if total is None or free is None:
        found, enough = "/dev/shm does not exist", False
    else:
        found, enough = f"/dev/shm has {format_bytes(total)}, {format_bytes(free)} free", free >= NEEDED_SHM_BYTES
    if enough or num_gpus < 2:
        return Check("shared memory", found, Severity.OK, needed)
    severity = Severity.ERROR if has_peer_access is False else Severity.WARNING
    remedy = "in Compose set SHM_SIZE=2gb; with docker run give --shm-size=2g; natively: sudo mount -o remount,size=2G /dev/shm"
    if total is not None and total >= NEEDED_SHM_BYTES:
        remedy = "remove files that ended programs left in /dev/shm"
    return Check("shared memory", found, severity, needed, remedy)


def _open_files(limit: int) -> Check:
    needed, found = f"{_NEEDED_FILES} or more", "unlimited" if limit == UNLIMITED else str(limit)
    if limit == UNLIMITED or limit >= _NEEDED_FILES:
        return Check("open files", found, Severity.OK, needed)
    remedy = "raise nofile: of the engine with default-ulimits in /etc/docker/daemon.json, natively in /etc/security/limits.conf"
    return Check("open files", found, Severity.WARNING, needed, remedy)


def _locked_memory(limit: int, *, over_network: bool) -> Check:
    found = "unlimited" if limit == UNLIMITED else format_bytes(limit)
    if limit == UNLIMITED or not over_network:
        return Check("locked memory", found, Severity.OK, "unlimited for GPUs on several nodes")
    remedy = "in Compose set ULIMIT_MEMLOCK=-1; natively set memlock to unlimited in /etc/security/limits.conf"
    return Check("locked memory", found, Severity.WARNING, "unlimited, for RDMA between nodes", remedy)


def _stack(limit: int) -> Check:
    needed, found = f"{format_bytes(_NEEDED_STACK_BYTES)} or more", "unlimited" if limit == UNLIMITED else format_bytes(limit)
    if limit == UNLIMITED or limit >= _NEEDED_STACK_BYTES:
        return Check("stack", found, Severity.OK, needed)
    return Check(
        "stack", found, Severity.WARNING, needed, "raise it with `ulimit -s 65536`, or the option --ulimit stack of the engine"
    )
