"""Check before the first step that the disk has room for the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import StorageError

_PER_TENSOR_BYTES = 8192  # upper bound: entries in manifest and header, 1 KiB, and the last block of a file
_COPIES = 2
_PER_CHECKPOINT_BYTES = 1 << 20  # directories, counters, generator states of the ranks


def required_bytes(tensor_bytes: Iterable[int]) -> int:
    """Return the most bytes that a checkpoint with tensors of these sizes takes on disk if none of them is stored yet."""
    sizes = list(tensor_bytes)
    return sum(sizes) + len(sizes) * _PER_TENSOR_BYTES + _PER_CHECKPOINT_BYTES


@dataclass(frozen=True)
class DiskSpace:
    held: int  # bytes of the files that it holds already
    free: int  # free bytes on its disk for this user


def space_of(directory: Path) -> DiskSpace:
    """Return the space that a directory takes, and the free space of its disk. The directory may not exist yet."""
    held = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    status = os.statvfs(existing)
    return DiskSpace(held, status.f_bavail * status.f_frsize)


def missing_bytes(space: DiskSpace, bytes_per_checkpoint: int, shared_bytes: int = 0, copies: int = _COPIES) -> int:
    """Return the free space that a number of checkpoints needs, of which some may exist. One more must always fit."""
    return max(shared_bytes + copies * bytes_per_checkpoint - space.held, bytes_per_checkpoint)


def check_space(directory: Path, bytes_per_checkpoint: int, shared_bytes: int = 0) -> None:
    """Refuse a directory without room for two checkpoints, with those it has. One more must fit: a save writes first."""
    space = space_of(directory)
    held, free = space.held, space.free
    needed = missing_bytes(space, bytes_per_checkpoint, shared_bytes)
    if free < needed:
        shared = f" and {shared_bytes / 1e9:.3f} GB that they share" if shared_bytes else ""
        raise StorageError(
            f"{directory}: {free / 1e9:.3f} GB are free, but checkpoints need {needed / 1e9:.3f} GB more ({_COPIES} checkpoints "
            f"of {bytes_per_checkpoint / 1e9:.3f} GB{shared}, {held / 1e9:.3f} GB exist already); make room, or use another disk "
            "for --run"
        )
