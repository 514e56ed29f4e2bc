"""Folders and files that a command writes to a path of the user."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Literal

from common.command_line import stop_on_signals
from common.errors import ConfigError, StorageError
from common.files import commit_directory, is_unfinished, sync_upwards, unfinished_path
from common.storage_errors import explain_os_error, naming

_log = logging.getLogger(__name__)
Target = Literal["folder", "file"]
_KINDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "a run": (("config.toml", "record.json"), ("config.toml", ".lock")),
    "prepared data": ((".prepare.lock",), ("manifest.json", "tokenizer")),
    "an exported model": (("export.json", "config.json"),),
}
"""For each kind of folder, entries that show it: all of one group are there."""


def check_target(path: Path, option: str, target: Target) -> None:
    """Refuse a path inside a run, prepared data or an exported model, because other commands read and delete what is there."""
    with suppress(OSError, ValueError, RuntimeError):  # the command that uses the path says what is wrong with it
        real = path.resolve()
        for folder in real.parents:
            if (kind := _kind(folder)) is None:
                continue
            # A page or a new file directly in a run is allowed, and so is a folder that is a run or prepared data already.
            is_beside = target == "file" and kind == "a run" and real.parent == folder
            if (is_beside and (real.suffix == ".html" or not real.exists())) or (target == "folder" and _kind(real)):
                return
            raise ConfigError(f"{option} = {path} is inside {folder}, which is {kind}; name a path outside of it")


def _kind(folder: Path) -> str | None:
    for kind, groups in _KINDS.items():
        if any(all((folder / name).exists() for name in names) for names in groups):
            return kind
    return None


@contextmanager
def new_folder(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder, renamed to `target` at the end of the context. It appears complete or not at all, and is durable.

    After a kill the next call for the target removes it. A kill between the two renames of `replaces` leaves neither folder.
    """
    with stop_on_signals(f"{target} is written whole or not at all: run the same command again"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # A kill between the two renames leaves the earlier folder under another name. It is kept until the new one is there.
        keeps = replaces and not target.exists()
        if not keeps:
            _remove_leftovers(target)
        folder = unfinished_path(target)
        try:
            with naming(target):
                folder.mkdir()
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    with suppress(OSError):  # the file system has no locks
                        fcntl.flock(lock, fcntl.LOCK_EX)  # until the folder is renamed or removed
                    yield folder
                    _put(folder, target, replaces=replaces)
                finally:
                    os.close(lock)
        except BaseException as error:
            full = ""
            if isinstance(error, OSError):
                if isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
                    error.filename = str(target)
                if error.errno == errno.ENOSPC:
                    full = explain_os_error(error)  # as long as the disk is full
            shutil.rmtree(folder, ignore_errors=True)
            if full:
                raise StorageError(full) from error
            raise
        if keeps:
            _remove_leftovers(target)


def _put(folder: Path, target: Path, *, replaces: bool) -> None:
    former = unfinished_path(target) if replaces and target.exists() else None
    try:
        if former is not None:
            target.rename(former)
        commit_directory(folder, target)
    except BaseException:
        if former is not None and former.exists() and not target.exists():
            former.rename(target)
        raise
    sync_upwards(target.parent)
    if former is not None:
        shutil.rmtree(former)


def _remove_leftovers(target: Path) -> None:
    """A folder whose lock is held is in use."""
    for left in target.parent.glob(f".{escape(target.name)}.*.tmp"):
        if not is_unfinished(left) or left.is_symlink() or not left.is_dir():
            continue
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        except BlockingIOError:
            continue
        except OSError as error:
            _log.warning("%s: left by an earlier command, and it cannot be removed (%s); remove it", left, error.strerror)
        finally:
            os.close(lock)
