"""The files of a checkpoint, for programs that copy it."""

from __future__ import annotations

from pathlib import Path

from common.errors import CheckpointError
from trainer.checkpoint.manifest import parse_manifest

__all__ = ["checkpoint_files"]


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files of the checkpoint at `path`, such as `checkpoints/step-00000500`: its object files, then its manifest.

    A copy must keep their paths relative to the folder of the checkpoints. Copy the manifest last: the copy is complete once it
    has the manifest. Object files never change and are shared between checkpoints, so skip those that the copy already has.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    manifest = path / "manifest.json"
    try:
        objects = parse_manifest(manifest.read_bytes()).objects
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest}: {error}; name a complete checkpoint") from None
    return [*(path.parent / "objects" / f"{name}.safetensors" for name in objects), manifest]
