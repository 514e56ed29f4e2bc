"""Which files a run folder has, and which of those in it do not belong there.

Nothing in a run folder is written or deleted through a symbolic link: the program's own folders in it have to be folders.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from common.errors import CheckpointError
from common.files import UnusableFileError, is_unfinished, open_output, own_folder, read_input, sync_directory

__all__ = ["check_places", "foreign_files", "make_folder", "open_own", "read_id"]

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
_CHECKED_LATER = re.compile(r"checkpoints/(?!objects$).*")
"""What the checkpoint store judges itself, because damage there is a reason to fall back to an earlier checkpoint."""
_ID_BYTES = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,127}")
_OF_WANDB = "wandb"
"""The folder of Weights & Biases, which says itself what is in it: links, too."""


def check_places(run: Path) -> None:
    """Refuses a run folder in which something else lies where the program has a folder or a file of its own.

    Raises:
        CheckpointError: it names the first link, pipe or the like.
    """
    own = re.compile(f"{_FILES}|extension\\.py|tokenizer/[^/]+")
    for name, status in _entries(run, ""):
        is_folder = name == _OF_WANDB or re.fullmatch(_FOLDERS, name) is not None
        wanted = stat.S_ISDIR if is_folder else stat.S_ISREG
        if (is_folder or own.fullmatch(name)) and not wanted(status.st_mode) and not _CHECKED_LATER.fullmatch(name):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else f"no {'directory' if is_folder else 'regular file'}"
            raise CheckpointError(f"{run / name} is {kind}; remove it, or use another --run")


def make_folder(path: Path) -> Path:
    """`path`, a folder that the program has in a run, created if it is missing; its name is on the device then.

    Raises:
        CheckpointError: a link or a file has its name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own_folder(path)
        sync_directory(path.parent)
        return path
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None


def open_own(path: Path, flags: int, *, run: Path) -> int:
    """A descriptor for writing to a file that the program has in a run; see `common.files.open_output`.

    Raises:
        CheckpointError: it is no regular file, a link leads to it, or it has a second name.
        OSError: it cannot be opened or created.
    """
    try:
        return open_output(path, flags, below=run)
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None


def read_id(path: Path, *, run: Path) -> str | None:
    """The id under which a tracking service knows the run, from a file of the run; None if there is no such file.

    Raises:
        CheckpointError: the file holds something else, or it is no regular file of the run.
    """
    try:
        text = read_input(path, _ID_BYTES, below=run).decode(errors="replace")
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None
    if not _ID.fullmatch(text):
        raise CheckpointError(f"{path}: it holds no id of a run; remove it, and the service shows a new run")
    return text


def foreign_files(run: Path, recorded: Collection[str]) -> list[str]:
    """What lies in a run folder and is not of the run: files, folders, links, pipes and the like, by name, sorted.

    A folder that does not belong there is named, and not what is in it.

    Args:
        run: directory of the run.
        recorded: names of the files that the record names.
    """
    known = frozenset(recorded)
    return sorted(name for name, status in _entries(run, "") if not _belongs(name, status, known))


def _belongs(name: str, status: os.stat_result, recorded: Collection[str]) -> bool:
    if stat.S_ISDIR(status.st_mode):
        return name == _OF_WANDB or re.fullmatch(_FOLDERS, name) is not None
    if not stat.S_ISREG(status.st_mode):
        return False
    return name in recorded or re.fullmatch(_FILES, name) is not None or is_unfinished(Path(name))


def _entries(run: Path, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """What lies in a folder and in those of its folders that belong there; links are not followed.

    The run may be going on: what is removed meanwhile is passed over.
    """
    with ExitStack() as stack:
        try:
            entries = stack.enter_context(os.scandir(run / folder))
        except FileNotFoundError:
            return
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield name, status
            if stat.S_ISDIR(status.st_mode) and re.fullmatch(_FOLDERS, name):
                yield from _entries(run, name)
