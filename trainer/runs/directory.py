"""The files of a run folder, foreign files in it, and its lock: one writer at a time.

Nothing in a run folder is written or deleted through a symbolic link: the folders of the program in it must be real folders.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch
from pydantic import ValidationError

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.files import (
    UnusableFileError,
    is_unfinished,
    open_output,
    own_folder,
    read_input,
    sync_directory,
    sync_upwards,
    write_atomic,
)
from common.hardware import num_cores
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.messages import explain
from common.settings.toml import parse_toml
from common.text import some_of
from common.untrusted import read_run_file
from data_pipeline.dataset.layout import MANIFEST
from trainer.config import TrainConfig
from trainer.config.not_a_run import not_a_run
from trainer.distributed.devices import check_no_gpu_is_hidden
from trainer.watchdog.files import read_own

__all__ = [
    "REFERENCE",
    "check_nothing_is_replaced",
    "check_places",
    "data_folder",
    "foreign_files",
    "load_config",
    "locked_run",
    "locked_unopened",
    "make_folder",
    "open_own",
    "read_id",
    "settings_here",
    "wait_until_free",
]

REFERENCE = "objective/reference.safetensors"
"""The initial weights of a run whose objective compares the model with them."""
_RESTORE = "put the file back as the run wrote it, or use another run"


def load_config(run: Path) -> TrainConfig:
    """Return the settings with which a run was last started.

    Raises:
        CheckpointError: the directory holds no run, or its settings are damaged.
    """
    path = run / "config.toml"
    try:
        config = TrainConfig.model_validate(parse_toml(read_run_file(path, MAX_SETTINGS_BYTES, run))["train"])
    except FileNotFoundError:
        raise CheckpointError(not_a_run(run, "config.toml")) from None
    except ValidationError as error:
        raise CheckpointError(f"{path}: {explain(TrainConfig, error)}; {_RESTORE}") from None
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: the settings cannot be read ({error}); {_RESTORE}") from None
    for name, value in (("batch.micro", config.batch.micro), ("precision", config.precision)):
        if value == "auto":
            raise CheckpointError(f"{path}: {name} = auto, but a run writes the value that it chose; {_RESTORE}")
    return config


def data_folder(run: Path, data: Path | None) -> Path:
    """Return the folder of a run's prepared data: `data`, or the folder in its settings.

    Raises:
        CheckpointError: the directory holds no run, or its settings are damaged.
        PreparedDataError: the folder in its settings holds no prepared data.
    """
    if data is not None:
        return data
    named = load_config(run).data
    if not _is_there(named / MANIFEST):
        why = "" if named.is_absolute() else f": the run names it {named}, as seen from where it was trained"
        raise PreparedDataError(
            f"{run}: its data was looked for in {named.absolute()}, and no {MANIFEST} is there{why}; name its folder with --data"
        )
    return named


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def settings_here(config: TrainConfig) -> TrainConfig:
    """Return the settings with which this machine can use a run: at most one thread per core; without a GPU, a CPU's attention.

    The precision stays, because CPUs compute in all precisions; a float8 run is used in bf16 on any machine.

    Raises:
        ConfigError: this machine has GPUs, and torch sees none.
    """
    cores = num_cores()
    if config.threads is not None and config.threads > cores:
        config = config.model_copy(update={"threads": cores})
    if torch.cuda.is_available():
        return config
    if config.device != "cpu":
        check_no_gpu_is_hidden()
    attention = "auto" if config.attention in ("varlen", "flex") else config.attention
    return config.model_copy(update={"device": "cpu", "attention": attention})


_FILES = (
    r"record\.json|config\.toml|metrics\.jsonl|hardware-rank-\d+\.jsonl|change-\d+\.json|report\.html|training_metrics\.png"
    r"|\.lock|\.shared-[0-9a-f]{16}|\.wandb-id|\.mlflow-id"
    r"|ledger/steps\.jsonl|heartbeat/rank-\d+|stacks/rank-\d+\.txt|tensorboard/events\.out\.tfevents\.[^/]+"
    r"|profile/rank-\d+-steps-\d+-\d+\.(json|pickle)"
    r"|objective/reference\.safetensors"
    r"|checkpoints/(\.bad-|\.)?step-\d{8,}(-\d+|\.tmp|\.deleted)?/manifest\.json"
    r"|checkpoints/objects/[0-9a-f]{64}\.safetensors|checkpoints/objects/\.\d+\.tmp"
)
"""Files that the program writes, in addition to the files that the record names."""
_OWN = re.compile(rf"{_FILES}|extension\.py|(tokenizer|objective)/[^/]+")
"""Everything that a start of a run replaces or deletes."""
_HEARTBEAT = re.compile(r"heartbeat/rank-\d+")
_FOLDERS = (
    r"tokenizer|objective|ledger|heartbeat|stacks|profile|tensorboard|checkpoints|checkpoints/objects"
    r"|checkpoints/(\.bad-|\.)?step-\d{8,}(-\d+|\.tmp|\.deleted)?"
)
_CHECKED_LATER = re.compile(r"checkpoints/(?!objects$).*")
"""Places that the checkpoint store checks: damage there makes the run use an earlier checkpoint."""
_ID_BYTES = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,127}")
_OF_WANDB = "wandb"
"""The folder of Weights & Biases. That program decides about its content, which may include links."""


def check_places(run: Path) -> None:
    """Check that each file and folder of the program in a run folder is a regular file or a folder.

    Raises:
        CheckpointError: one is a link, a pipe or another kind; the message names the first.
    """
    for name, status in _entries(run, ""):
        is_folder = name == _OF_WANDB or re.fullmatch(_FOLDERS, name) is not None
        wanted = stat.S_ISDIR if is_folder else stat.S_ISREG
        if (is_folder or _OWN.fullmatch(name)) and not wanted(status.st_mode) and not _CHECKED_LATER.fullmatch(name):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else f"no {'directory' if is_folder else 'regular file'}"
            raise CheckpointError(f"{run / name} is {kind}; remove it, or use another --run")


def check_nothing_is_replaced(run: Path) -> None:
    """Check that a new run replaces and deletes no file that no run has written.

    A start of a run makes the lock file before any other file, so files without it are not those of an earlier start.

    Raises:
        ConfigError: it would; the message names the first file.
    """
    if (run / "record.json").exists() or (run / _LOCK).exists():
        return
    if replaced := sorted(name for name, _ in _entries(run, "") if _OWN.fullmatch(name)):
        raise ConfigError(
            f"{run}: {some_of(replaced)} would be replaced, but no run has written it; name another folder for the run (--run), or "
            "move it to another folder"
        )


def make_folder(path: Path) -> Path:
    """Return `path`, a folder of the program in a run. If it is missing, it is created, and its name is forced to the device.

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
    """Return a descriptor for writing to a file of the program in a run; see `common.files.open_output`.

    Raises:
        CheckpointError: it is no regular file, a link leads to it, or it has a second name.
        OSError: it cannot be opened or created.
    """
    try:
        return open_output(path, flags, below=run)
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None


def read_id(path: Path, *, run: Path) -> str | None:
    """Return the id of the run at a tracking service, from a file of the run; None if there is no such file.

    Raises:
        CheckpointError: the file holds no id, or it is no regular file of the run.
    """
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
    """Return the names of files, folders, links and pipes in a run folder that do not belong to the run, sorted.

    A foreign folder is named without its content.

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
    """Yield the entries of a folder and of its folders that belong to the run; links are not followed.

    The run may be in progress: an entry that is removed meanwhile is skipped.
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


_LOCK = ".lock"
_NAME_ATTEMPTS, _NAME_WAIT_S, _HOLDER_BYTES = 100, 0.01, 4096


@contextmanager
def locked_run(run: Path, *, doing: str = "is training here", option: str = "--run") -> Iterator[None]:
    """Lock a run directory against a second trainer. The kernel frees the lock when the process ends, for any reason.

    The lock file names the holder while the lock is held.

    Args:
        run: the directory.
        doing: what the holder of the lock does, for the message.
        option: names the directory on the command line, for the message.

    Raises:
        ConfigError: another process holds the lock; the message names it.
        CheckpointError: the lock file is a link or no regular file.
    """
    with ExitStack() as stack:
        while True:
            run.mkdir(parents=True, exist_ok=True)
            sync_upwards(run)
            file = stack.enter_context(os.fdopen(open_own(run / _LOCK, os.O_RDWR, run=run), "r+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{run}: {_holder(file)} {doing}; wait for it or use another {option}") from None
            if os.fstat(file.fileno()).st_nlink:  # else a start that trained nothing has removed the file meanwhile
                break
        before = os.pread(file.fileno(), _HOLDER_BYTES, 0)
        _write_holder(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):  # a full disk: the name then stays, and does no harm
                _write_holder(file, before)


def _write_holder(file: TextIO, name: bytes) -> None:
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), name, 0)


@contextmanager
def locked_unopened(run: Path) -> Iterator[ExitStack]:
    """Lock a run directory. Yield a stack that puts the folder back if the start ends before `pop_all` of the stack is called."""
    missing = [folder for folder in (run, *run.parents) if not folder.exists()]
    had_lock = (run / _LOCK).exists()
    with locked_run(run):
        found = dict(_entries(run, ""))
        if not had_lock:
            found.pop(_LOCK, None)
        beats = [run / name for name, status in found.items() if _HEARTBEAT.fullmatch(name) and stat.S_ISREG(status.st_mode)]
        heartbeats = {path: read_own(path) for path in beats}
        with ExitStack() as undo:
            undo.callback(_put_back, run, frozenset(found), heartbeats, missing)
            yield undo


def _put_back(run: Path, names: Collection[str], heartbeats: Mapping[Path, bytes], missing: Sequence[Path]) -> None:
    """Remove the files of the program that a start has made in a run folder, and write the heartbeats before it again.

    Stacks stay, because they say why a start hung, and so do checkpoints that were found damaged.

    Args:
        run: the folder.
        names: its files and folders before the start.
        heartbeats: contents of the heartbeats before the start.
        missing: folders that the start has made: the run and its parents, the innermost first.
    """
    for name, status in reversed([entry for entry in _entries(run, "") if entry[0] not in names]):  # files before their folder
        path = run / name
        if name.startswith("checkpoints/") and "checkpoints" in names:
            continue
        if stat.S_ISDIR(status.st_mode) and re.fullmatch(_FOLDERS, name):
            with suppress(OSError):  # it is not empty
                path.rmdir()
        elif _OWN.fullmatch(name) and not (name.startswith("stacks/") and status.st_size):
            path.unlink(missing_ok=True)
    for path, beat in heartbeats.items():
        write_atomic(path, beat)
    with suppress(OSError):
        for folder in missing:
            folder.rmdir()


def wait_until_free(run: Path, timeout_s: float) -> None:
    """Wait until no trainer holds the lock of a run directory, for example after its launcher was killed.

    Raises:
        ConfigError: a trainer still holds it after `timeout_s`; the message names it.
        CheckpointError: the lock file is a link or no regular file.
    """
    if not (run / _LOCK).exists():
        return
    deadline = time.monotonic() + timeout_s
    with os.fdopen(open_own(run / _LOCK, os.O_RDWR, run=run), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{run}: {_holder(file)} is training here; wait for it, or end it") from None
                time.sleep(_NAME_WAIT_S)


def _holder(file: TextIO) -> str:
    """Return the name of the process that holds the lock. It writes the name as soon as it has the lock."""
    for _ in range(_NAME_ATTEMPTS):
        file.seek(0)
        if name := file.read().strip():
            return name
        time.sleep(_NAME_WAIT_S)
    return "another process"
