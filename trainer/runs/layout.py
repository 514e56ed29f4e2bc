"""The names of a run's files and folders. The program writes and deletes nothing through a symbolic link, so they are checked."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from common.command_line import command_text
from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, is_unfinished, open_output, own_folder, read_input, sync_directory
from common.text import some_of

RECORD, CONFIG, LOCK, METRICS = "record.json", "config.toml", ".lock", "metrics.jsonl"
LEDGER = Path("ledger") / "steps.jsonl"
TOKENIZER, TASK_FOLDER, CHECKPOINTS = "tokenizer", "objective", "checkpoints"
EXTENSION, EXTENSION_FOLDER = "extension.py", "extension"  # the copy of an extension: its file, or its folder
REFERENCE = f"{TASK_FOLDER}/reference.safetensors"  # the initial weights of a run whose task compares the model with them
CHECKPOINT_MANIFEST, OBJECTS = "manifest.json", "objects"
STEP_FOLDER = r"step-(\d{8,})"

_STEP = r"(\.bad-|\.)?step-\d{8,}(-\d+|\.tmp|\.deleted)?"
_FILES = re.compile(
    r"record\.json|config\.toml|metrics\.jsonl|hardware-rank-\d+\.jsonl|change-\d+\.json|report\.html|training_metrics\.png"
    r"|\.lock|\.shared-[0-9a-f]{16}|\.wandb-id|\.mlflow-id"
    r"|ledger/steps\.jsonl|heartbeat/rank-\d+|stacks/rank-\d+\.txt|tensorboard/events\.out\.tfevents\.[^/]+"
    r"|profile/rank-\d+-steps-\d+-\d+\.(json|pickle)"
    r"|objective/reference\.safetensors"
    rf"|checkpoints/{_STEP}/manifest\.json"
    r"|checkpoints/objects/[0-9a-f]{64}\.safetensors|checkpoints/objects/\.\d+\.tmp"
)
"""Files that the program writes, in addition to the files that the record names."""
_EXTENSION_FILE = r"extension(\.py|(/\w+)*/\w[\w-]*(\.[\w-]+)+)"  # files have a dot, folders have none
_EXTENSION = re.compile(_EXTENSION_FILE, re.ASCII)
_OWN = re.compile(rf"{_FILES.pattern}|{_EXTENSION_FILE}|(tokenizer|objective)/[^/]+", re.ASCII)
"""Everything that a start of a run replaces or deletes."""
_FOLDERS = re.compile(
    rf"tokenizer|objective|ledger|heartbeat|stacks|profile|tensorboard|checkpoints|checkpoints/objects|checkpoints/{_STEP}"
    r"|extension(/\w+)*",
    re.ASCII,
)
_CHECKED_LATER = re.compile(r"checkpoints/(?!objects$).*")
"""Places that the checkpoint store checks: damage there makes the run use an earlier checkpoint."""
HEARTBEAT = re.compile(r"heartbeat/rank-\d+")
_OF_WANDB = "wandb"  # The folder of Weights & Biases. That program decides about its content, which may include links.
_ID_BYTES = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,127}")


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def steps_among(names: Iterable[str]) -> list[int]:
    found = [(int(match[1]), name) for name in names if (match := re.fullmatch(STEP_FOLDER, name))]
    return sorted(step for step, name in found if step_folder(step) == name)


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, sorted. Raises CheckpointError if `checkpoints` is a link or a file."""
    folder = run / CHECKPOINTS
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(
            f"{folder} is a link or a file, and must be the directory with the checkpoints of the run; restore it"
        )
    return steps_among(path.name for path in folder.iterdir()) if folder.exists() else []


def manifest_path(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / step_folder(step) / CHECKPOINT_MANIFEST


def object_path(checkpoints: Path, name: str) -> Path:
    return checkpoints / OBJECTS / f"{name}.safetensors"


def not_a_run(folder: Path, missing: str) -> str:
    # a Hugging Face directory is a frequent mistake, because it holds a model too
    if (folder / "config.json").is_file():
        command = command_text("import", folder, "--output", "RUN")
        return f"{folder}: this is a Hugging Face directory, not a run; make a run of its model: {command}"
    if missing == CONFIG and (folder / RECORD).is_file():
        return f"{folder / missing}: missing; restore it from a copy"
    return f"{folder}: no {missing}, so this is not a run; name a directory that `trainer train --run` wrote"


def is_own_file(name: str) -> bool:
    return _OWN.fullmatch(name) is not None


def is_extension(name: str) -> bool:
    return _EXTENSION.fullmatch(name) is not None


def is_folder(name: str) -> bool:
    return _FOLDERS.fullmatch(name) is not None


def check_paths(run: Path) -> None:
    """Refuse a run in which a file or folder of the program is a link, a pipe or another kind."""
    for name, status in entries(run):
        wants_folder = name == _OF_WANDB or is_folder(name)
        wanted = stat.S_ISDIR if wants_folder else stat.S_ISREG
        if (wants_folder or is_own_file(name)) and not wanted(status.st_mode) and not _CHECKED_LATER.fullmatch(name):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else f"no {'directory' if wants_folder else 'regular file'}"
            raise CheckpointError(f"{run / name} is {kind}; remove it, or use another --run")


def check_nothing_is_replaced(run: Path) -> None:
    # A start of a run makes the lock file before any other file, so files without it are not those of an earlier start.
    if (run / RECORD).exists() or (run / LOCK).exists():
        return
    if replaced := sorted(name for name, _ in entries(run) if is_own_file(name)):
        raise ConfigError(
            f"{run}: {some_of(replaced)} would be replaced, but no run has written it; name another folder for the run (--run), or "
            "move it to another folder"
        )


def make_folder(path: Path) -> Path:
    """Return `path`, a folder of the program in a run. If it is missing, it is created, and its name is forced to the device."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own_folder(path)
        sync_directory(path.parent)
        return path
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None


def open_own(path: Path, flags: int, *, run: Path) -> int:
    try:
        return open_output(path, flags, below=run)
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None


def read_id(path: Path, *, run: Path) -> str | None:
    """Return the id of the run at a tracking service, from a file of the run; None if there is no such file."""
    try:
        text = read_input(path, _ID_BYTES, below=run).decode(errors="replace")
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None
    if not _ID.fullmatch(text):
        raise CheckpointError(f"{path}: it holds no id of a run; remove it, and the tracking service then shows a new run")
    return text


def foreign_files(run: Path, recorded: Collection[str]) -> list[str]:
    """Return what does not belong to the run, sorted. A foreign folder is named without its content."""
    known, foreign = frozenset(recorded), []
    for name, status in entries(run):
        if stat.S_ISDIR(status.st_mode):
            belongs = name == _OF_WANDB or is_folder(name)
        else:
            is_own = name in known or _FILES.fullmatch(name) is not None or is_unfinished(Path(name))
            belongs = is_own and stat.S_ISREG(status.st_mode)
        if not belongs:
            foreign.append(name)
    return sorted(foreign)


def entries(run: Path, folder: str = "") -> Iterator[tuple[str, os.stat_result]]:
    # the run may be in progress: an entry that is removed meanwhile is skipped
    with ExitStack() as stack:
        try:
            found = stack.enter_context(os.scandir(run / folder))
        except FileNotFoundError:
            return
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield name, status
            if stat.S_ISDIR(status.st_mode) and is_folder(name):
                yield from entries(run, name)
