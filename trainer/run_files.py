"""Which files a run folder has, and which of those in it do not belong there.

Nothing in a run folder is written or deleted through a symbolic link: the program's own folders in it have to be folders.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from data_pipeline.files import is_unfinished

__all__ = ["foreign_files"]

_FILES = (
    r"record\.json|config\.toml|metrics\.jsonl|hardware-rank-\d+\.jsonl|change-\d+\.json|report\.html|training_metrics\.png"
    r"|\.lock|\.wandb-id|\.mlflow-id"
    r"|ledger/steps\.jsonl|heartbeat/rank-\d+|stacks/rank-\d+\.txt|tensorboard/events\.out\.tfevents\.[^/]+"
    r"|checkpoints/(\.bad-|\.)?step-\d{8,}(-\d+|\.tmp|\.deleted)?/manifest\.json"
    r"|checkpoints/objects/[0-9a-f]{64}\.safetensors|checkpoints/objects/\.\d+\.tmp"
)
"""What the program writes, beside the files that the record names."""
_FOLDERS = (
    r"tokenizer|ledger|heartbeat|stacks|tensorboard|checkpoints|checkpoints/objects"
    r"|checkpoints/(\.bad-|\.)?step-\d{8,}(-\d+|\.tmp|\.deleted)?"
)
_OF_WANDB = "wandb"
"""The folder of Weights & Biases, which says itself what is in it: links, too."""


def foreign_files(run: Path, recorded: Collection[str]) -> list[str]:
    """What lies in a run folder and is not of the run: files, folders, links, pipes and the like, by name, sorted.

    A folder that does not belong there is named, and not what is in it.

    Args:
        run: directory of the run.
        recorded: names of the files that the record names.
    """
    own = re.compile("|".join([_FILES, *map(re.escape, recorded)]))
    return sorted(name for name, status in _entries(run, "") if not _belongs(name, status, own))


def _belongs(name: str, status: os.stat_result, own: re.Pattern[str]) -> bool:
    if stat.S_ISDIR(status.st_mode):
        return name == _OF_WANDB or re.fullmatch(_FOLDERS, name) is not None
    if not stat.S_ISREG(status.st_mode):
        return False
    return own.fullmatch(name) is not None or is_unfinished(Path(name))


def _entries(run: Path, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """What lies in a folder and in those of its folders that belong there; links are not followed."""
    with os.scandir(run / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            status = entry.stat(follow_symlinks=False)
            yield name, status
            if stat.S_ISDIR(status.st_mode) and re.fullmatch(_FOLDERS, name):
                yield from _entries(run, name)
