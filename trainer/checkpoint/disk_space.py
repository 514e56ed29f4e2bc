"""Is there room for the checkpoints of a run, before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from common.errors import ConfigError

__all__ = ["check_space", "required_bytes"]

_PER_TENSOR_BYTES = 8192  # an entry in manifest and header of at most 1 KiB, and a file's last block, generously
_COPIES = 2
_PER_CHECKPOINT_BYTES = 1 << 20  # directories, counters, generator states of the ranks


def required_bytes(tensor_bytes: Iterable[int]) -> int:
    """What a checkpoint with tensors of these sizes takes on the device at most, when none is stored already."""
    sizes = list(tensor_bytes)
    return sum(sizes) + len(sizes) * _PER_TENSOR_BYTES + _PER_CHECKPOINT_BYTES


def check_space(directory: Path, bytes_per_checkpoint: int) -> None:
    """Refuses a directory that cannot hold two checkpoints at a time, the one that stays and the one that is written.

    What checkpoints of this run take already counts as theirs, but one more must always fit: a save needs room
    before it can delete.

    Raises:
        ConfigError: it says how much is needed and how much is free.
    """
    held = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    needed = max(_COPIES * bytes_per_checkpoint - held, bytes_per_checkpoint)
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise ConfigError(
            f"{directory}: {free / 1e9:.3f} GB are free, and checkpoints need {needed / 1e9:.3f} GB more: {_COPIES} of "
            f"{bytes_per_checkpoint / 1e9:.3f} GB, of which {held / 1e9:.3f} GB are there; make room, "
            "or use a --run on a larger disk"
        )
