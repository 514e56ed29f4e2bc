"""Which files a checkpoint consists of, for those who copy it elsewhere."""

from __future__ import annotations

from pathlib import Path

from common.errors import CheckpointError
from trainer.checkpoint.manifest import parse_manifest

__all__ = ["checkpoint_files"]


def checkpoint_files(path: Path) -> list[Path]:
    """The files of the checkpoint at `path`, such as `checkpoints/step-00000500`: its tensors, and last its manifest.

    A copy has to keep their places relative to the folder of the checkpoints. It is complete once the manifest is there, because
    that is copied last. Object files never change and are shared between checkpoints: one that is there already can be passed over.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    manifest = path / "manifest.json"
    try:
        objects = parse_manifest(manifest.read_bytes()).objects
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest}: {error}; name a checkpoint that is complete") from None
    return [*(path.parent / "objects" / f"{name}.safetensors" for name in objects), manifest]
