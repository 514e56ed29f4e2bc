"""A folder with one complete checkpoint, for code that copies it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common.errors import CheckpointError
from trainer.checkpoint.store import checkpoint_files

__all__ = ["link_checkpoint"]


def link_checkpoint(checkpoint: Path, folder: Path) -> Path | None:
    """Make a folder with all files of a checkpoint and nothing else, in the layout of a folder of checkpoints.

    The files are hard links where the file system has them, so they take no space.

    Args:
        checkpoint: the folder of its manifest, such as `checkpoints/step-00000500`.
        folder: is made, with a folder named after the checkpoint in it. Whatever it held is deleted.

    Returns:
        The folder named after the checkpoint; None if the checkpoint was deleted because newer ones replaced it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    whole = folder / checkpoint.name
    try:
        for file in checkpoint_files(checkpoint):
            target = whole / file.relative_to(checkpoint.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(file, target)
    except (CheckpointError, FileNotFoundError):
        shutil.rmtree(folder)
        return None
    return whole


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no hard links
        shutil.copyfile(file, target)
