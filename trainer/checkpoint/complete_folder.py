"""A folder with one complete checkpoint, for code that copies it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common.errors import CheckpointError
from trainer.checkpoint.store import checkpoint_files


def link_checkpoint(checkpoint: Path, folder: Path) -> Path | None:
    """Replace `folder` by links to a checkpoint's files. Return its folder there, None if the checkpoint was deleted meanwhile."""
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
