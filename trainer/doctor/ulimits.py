"""Checks of what the kernel allows this process: shared memory, open files, locked memory, stack. Standard library alone."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.text import format_bytes
from trainer.doctor.check import Check, Severity, check

UNLIMITED = -1
_SHM = Path("/dev/shm")
NEEDED_SHM_BYTES = 1 << 30
"""NVIDIA's advice for containers with NCCL (NCCL user guide, "Shared memory"). Docker's default is 64 MiB."""
_NEEDED_FILES = 4096
_NEEDED_STACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Ulimits:
    shm_bytes: int | None  # size of /dev/shm, None if there is none
    shm_free_bytes: int | None
    open_files: int  # the hard limit, because a training raises its own limit to it
    locked_bytes: int
    stack_bytes: int


def read_ulimits(shm: Path = _SHM) -> Ulimits:
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
    return [
        check_shared_memory(ulimits, num_gpus=num_gpus, has_peer_access=has_peer_access),
        _limit(
            "open files",
            ulimits.open_files,
            _NEEDED_FILES,
            str,
            "raise nofile: of the engine with default-ulimits in /etc/docker/daemon.json, natively in /etc/security/limits.conf",
        ),
        _limit(
            "locked memory",
            ulimits.locked_bytes,
            UNLIMITED if num_nodes > 1 and num_gpus > 0 else 0,
            format_bytes,
            "in Compose set ULIMIT_MEMLOCK=-1; natively set memlock to unlimited in /etc/security/limits.conf",
        ),
        _limit(
            "stack",
            ulimits.stack_bytes,
            _NEEDED_STACK_BYTES,
            format_bytes,
            "raise it with `ulimit -s 65536`, or the option --ulimit stack of the engine",
        ),
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


def _limit(name: str, limit: int, least: int, shown: Callable[[int], str], remedy: str) -> Check:
    found = "unlimited" if limit == UNLIMITED else shown(limit)
    if least == UNLIMITED:
        needed, is_enough = "unlimited, for RDMA between nodes", limit == UNLIMITED
    else:
        needed, is_enough = f"{shown(least)} or more" if least else "", limit == UNLIMITED or limit >= least
    return Check(name, found, Severity.OK, needed) if is_enough else Check(name, found, Severity.WARNING, needed, remedy)
