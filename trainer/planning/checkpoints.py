"""The space on the disk that the checkpoints of a run need, and the check before the first step that it is there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import StorageError
from trainer.config import CheckpointConfig, TrainConfig
from trainer.model.cost import FP32_BYTES
from trainer.model.decoder import num_weights
from trainer.model.memory_estimate import estimate
from trainer.runs.layout import CHECKPOINTS

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
    needed = missing_bytes(space, bytes_per_checkpoint, shared_bytes)
    if space.free < needed:
        shared = f" and {shared_bytes / 1e9:.3f} GB that they share" if shared_bytes else ""
        raise StorageError(
            f"{directory}: {space.free / 1e9:.3f} GB are free, but checkpoints need {needed / 1e9:.3f} GB more ({_COPIES} "
            f"checkpoints of {bytes_per_checkpoint / 1e9:.3f} GB{shared}, {space.held / 1e9:.3f} GB exist already); make room, or "
            "use another disk for --run"
        )


def checkpoint_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Return the bytes of one checkpoint without frozen weights. An estimate, because an extension may build another model."""
    whole = estimate(config, vocab_size, config.model.context, 1, 1, config.optim.optimizer.state_bytes)
    return required_bytes([whole.weights - frozen_bytes(config, vocab_size), whole.optimizer, whole.average])


def frozen_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Return the bytes of the frozen weights, which all checkpoints share. There are none without adapters."""
    return 0 if config.lora.rank is None else FP32_BYTES * num_weights(config.model, vocab_size)


def most_checkpoints(settings: CheckpointConfig, num_steps: int) -> int:
    """Return the most checkpoints on the disk at one time, with the best one. Saves after `every_minutes` are not counted."""
    kept = settings.keep_last + 2 + (0 if settings.keep_every is None else num_steps // settings.keep_every)
    return min(kept, -(-num_steps // settings.every_steps)) if num_steps else kept


def space_needed(config: TrainConfig, vocab_size: int) -> tuple[int, int]:
    """Return the free bytes without which a run does not start, and those that all its checkpoints need."""
    each, shared = checkpoint_bytes(config, vocab_size), frozen_bytes(config, vocab_size)
    space = space_of(config.run / CHECKPOINTS)
    most = most_checkpoints(config.checkpoint, config.limits.steps or 0)
    return missing_bytes(space, each, shared), missing_bytes(space, each, shared, max(2, most))
