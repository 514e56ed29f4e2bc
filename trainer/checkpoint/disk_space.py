"""Check before the first step that the disk has room for the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from common.errors import ConfigError

__all__ = ["check_space", "required_bytes"]

_PER_TENSOR_BYTES = 8192  # upper bound: entries in manifest and header, 1 KiB, and the last block of a file
_COPIES = 2
_PER_CHECKPOINT_BYTES = 1 << 20  # directories, counters, generator states of the ranks


def required_bytes(tensor_bytes: Iterable[int]) -> int:
    """Return the most bytes that a checkpoint with tensors of these sizes takes on disk if none of them is stored yet."""
    sizes = list(tensor_bytes)
    return sum(sizes) + len(sizes) * _PER_TENSOR_BYTES + _PER_CHECKPOINT_BYTES


def check_space(directory: Path, bytes_per_checkpoint: int) -> None:
    """Refuse a directory without room for two checkpoints: the one that is kept and the one that is written.

    Checkpoints that the run already has count towards the two. One more must always fit, because a save writes the new checkpoint
    before it deletes an old one.

    Raises:
        ConfigError: there is too little room. The message says how much is needed and how much is free.
    """
    held = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    needed = max(_COPIES * bytes_per_checkpoint - held, bytes_per_checkpoint)
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise ConfigError(
            f"{directory}: {free / 1e9:.3f} GB are free, but checkpoints need {needed / 1e9:.3f} GB more ({_COPIES} checkpoints "
            f"of {bytes_per_checkpoint / 1e9:.3f} GB, {held / 1e9:.3f} GB exist already); make room, or use another disk for --run"
        )
