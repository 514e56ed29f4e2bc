"""The lock of a run folder: one writer at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from common.errors import ConfigError
from common.files import left_unfinished, sync_upwards, write_atomic
from trainer.runs.layout import CHECKPOINTS, HEARTBEAT, LOCK, entries, is_folder, is_own_file, open_own
from trainer.watchdog.heartbeat import read_beat

_NAME_ATTEMPTS, _NAME_WAIT_S, _HOLDER_BYTES = 100, 0.01, 4096


@contextmanager
def locked_run(run: Path, *, doing: str = "is training here", option: str = "--run") -> Iterator[None]:
    """The kernel frees the lock when the process ends. The file names the holder. `doing` and `option` are for the message."""
    with ExitStack() as stack:
        while True:
            run.mkdir(parents=True, exist_ok=True)
            sync_upwards(run)
            file = stack.enter_context(os.fdopen(open_own(run / LOCK, os.O_RDWR, run=run), "r+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{run}: {_holder(file)} {doing}; wait for it or use another {option}") from None
            if os.fstat(file.fileno()).st_nlink:  # else a start that trained nothing has removed the file meanwhile
                break
        _remove_unfinished(run)
        before = os.pread(file.fileno(), _HOLDER_BYTES, 0)
        _write_holder(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):  # a full disk: the name then stays, and does no harm
                _write_holder(file, before)


def _remove_unfinished(run: Path) -> None:
    for name, status in [*entries(run)]:
        path = run / name
        if left_unfinished(path):
            shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink(missing_ok=True)


def _write_holder(file: TextIO, name: bytes) -> None:
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), name, 0)


@contextmanager
def locked_unopened(run: Path) -> Iterator[ExitStack]:
    """Lock a run directory. Yield a stack that puts the folder back if the start ends before `pop_all` of the stack is called."""
    missing = [folder for folder in (run, *run.parents) if not folder.exists()]
    had_lock = (run / LOCK).exists()
    with locked_run(run):
        found = dict(entries(run))
        if not had_lock:
            found.pop(LOCK, None)
        beats = [run / name for name, status in found.items() if HEARTBEAT.fullmatch(name) and stat.S_ISREG(status.st_mode)]
        heartbeats = {path: read_beat(path) for path in beats}
        with ExitStack() as undo:
            undo.callback(_put_back, run, frozenset(found), heartbeats, missing)
            yield undo


def _put_back(run: Path, names: Collection[str], heartbeats: Mapping[Path, bytes], missing: Sequence[Path]) -> None:
    """Stacks stay, because they say why a start hung, as do damaged checkpoints. `missing`: new folders, the innermost first."""
    for name, status in reversed([entry for entry in entries(run) if entry[0] not in names]):  # files before their folder
        path = run / name
        if name.startswith(f"{CHECKPOINTS}/") and CHECKPOINTS in names:
            continue
        if stat.S_ISDIR(status.st_mode) and is_folder(name):
            with suppress(OSError):  # it is not empty
                path.rmdir()
        elif is_own_file(name) and not (name.startswith("stacks/") and status.st_size):
            path.unlink(missing_ok=True)
    for path, beat in heartbeats.items():
        write_atomic(path, beat)
    with suppress(OSError):
        for folder in missing:
            folder.rmdir()


def wait_until_free(run: Path, timeout_s: float) -> None:
    if not (run / LOCK).exists():
        return
    deadline = time.monotonic() + timeout_s
    with os.fdopen(open_own(run / LOCK, os.O_RDWR, run=run), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_unfinished(run)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{run}: {_holder(file)} is training here; wait for it, or end it") from None
                time.sleep(_NAME_WAIT_S)


def _holder(file: TextIO) -> str:
    for _ in range(_NAME_ATTEMPTS):
        file.seek(0)
        if name := file.read().strip():
            return name
        time.sleep(_NAME_WAIT_S)
    return "another process"
