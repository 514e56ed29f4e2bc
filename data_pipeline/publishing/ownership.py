"""Who may write to an output folder: one preparation at a time, and never over files of others."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import ConfigError, StorageError
from common.files import (
    UnusableFileError,
    canonical_json,
    is_unfinished,
    own_folder,
    read_input,
    sync_upwards,
    write_atomic,
)
from data_pipeline.dataset.layout import FOLDERS, INPUTS, LOCK, MANIFEST, PUBLISHED, SINGLE_FILES, WORK
from data_pipeline.dataset.manifest import files_in_manifest

__all__ = ["exclusive", "noted_files", "own_files", "work_directory", "work_folders", "write_note"]

logger = logging.getLogger(__name__)
_WORK_NAME = re.compile("[0-9a-f]{16}")
_NOTE_FORMAT = "published-files/1"
_MAX_NOTE_BYTES = 512 << 20


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds a folder against a second preparation at the same time, and removes what a killed one left half written.

    Raises:
        ConfigError: files of somebody else's would be replaced, or a link stands where a preparation keeps its own files.
        StorageError: another one is at work in it, or it cannot be written to.
    """
    try:
        check_nothing_foreign(directory)
        directory.mkdir(parents=True, exist_ok=True)
        own_folder(directory / WORK)
        file = _open_lock(directory / LOCK)  # last, as nobody closes it if another of these fails
    except UnusableFileError as error:
        raise ConfigError(f"{error}, or choose another --output") from None
    except (FileExistsError, NotADirectoryError):
        raise StorageError(f"{directory}: a file stands where the output folder should be; choose another --output") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{directory}: another `prepare` is writing to it; wait for its end, or choose another --output"
            ) from None
        # A killed preparation may have created the folder or moved files in and out without forcing that to the device. What is
        # taken for done, and what is removed because of it, must not come back or get lost after a power failure.
        sync_upwards(directory)
        _clear_half_written(directory)
        try:
            yield
        finally:
            with suppress(OSError):  # it holds work, or something else
                (directory / WORK).rmdir()


def _open_lock(path: Path) -> BinaryIO:
    """The lock file, created if it is missing; never one that a link leads to."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UnusableFileError(f"{path} is no regular file; remove it and run the same command again")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    return os.fdopen(descriptor, "r+b")


def _clear_half_written(directory: Path) -> None:
    """Removes what a killed preparation has not finished, and whatever in its work no preparation leaves there."""
    beside = [path for name in (MANIFEST, PUBLISHED, INPUTS) for path in directory.glob(f".{name}.*") if is_unfinished(path)]
    for path in beside:
        _remove(path)
    for work in work_folders(directory):
        strange = [work] if work.is_symlink() or not work.is_dir() else list(_strange_entries(work))
        for path in strange:
            _remove(path)
        if foreign := [path for path in strange if not is_unfinished(path)]:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            logger.warning("%s%s: removed, as it is not what a preparation leaves there", foreign[0], more)


def _strange_entries(folder: Path) -> Iterator[Path]:
    """What in a work folder is unfinished, or not what its name says: files of the stages have an extension, folders have none."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if is_unfinished(path):
                yield path
            elif entry.is_dir(follow_symlinks=False) and not path.suffix:
                yield from _strange_entries(path)
            elif not (entry.is_file(follow_symlinks=False) and (path.suffix or path.name.startswith("."))):
                yield path


def _remove(path: Path) -> None:
    """Removes a file or a folder; of a link it removes the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_nothing_foreign(directory: Path) -> None:
    """Refuses a folder in which publishing would replace a file that no preparation has put there.

    Raises:
        ConfigError: there is one.
    """
    own = own_files(directory)
    foreign = [name for name in _files_in_the_way(directory) if name not in own]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ConfigError(
            f"{directory}: {foreign[0]}{more} would be replaced, and no `prepare` has written it; choose another --output, "
            "or move it away"
        )


def own_files(directory: Path) -> set[str]:
    """What preparations have put into a folder, by their own records of it."""
    listed = noted_files(directory).keys() | files_in_manifest(directory)
    if listed:
        return {*listed, *SINGLE_FILES}
    # The only one that is there before anything is published.
    return {INPUTS} if _holds_digests(directory / INPUTS) or _is_at_work(directory) else set()


def _files_in_the_way(directory: Path) -> Iterator[str]:
    """Every file that has the place of something that is published, or lies in a folder that has."""
    for path in (directory / name for name in (*SINGLE_FILES, *FOLDERS)):
        if path.is_dir() and not path.is_symlink():
            inside = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
            yield from sorted(file.relative_to(directory).as_posix() for file in inside)
        elif os.path.lexists(path):
            yield path.name


def _holds_digests(path: Path) -> bool:
    """Whether a file is what `remember_digests` writes."""
    try:
        value = json.loads(read_input(path, _MAX_NOTE_BYTES, below=path.parent))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and all(name.startswith("sha256:") or name == "seal" for name in value)


def _is_at_work(directory: Path) -> bool:
    """Whether a preparation was killed in this folder: its work folder is there, and holds nothing else."""
    work = directory / WORK
    return work.is_dir() and not work.is_symlink() and all(_WORK_NAME.fullmatch(path.name) for path in work.iterdir())


def noted_files(directory: Path) -> dict[str, Any]:
    """The files that the note names, as they were when they were last found in order; nothing without a note."""
    try:
        value = json.loads(read_input(directory / PUBLISHED, _MAX_NOTE_BYTES, below=directory))
    except (OSError, ValueError, RecursionError):
        return {}
    is_note = isinstance(value, dict) and value.get("format") == _NOTE_FORMAT and isinstance(value.get("files"), dict)
    return value["files"] if is_note else {}


def write_note(directory: Path, files: Mapping[str, Any]) -> None:
    """Writes down which files of a folder a preparation has put there, and their state."""
    write_atomic(directory / PUBLISHED, canonical_json({"format": _NOTE_FORMAT, "files": files}))


def work_directory(directory: Path, fingerprint: str) -> Path:
    """Where the stages leave their results for these settings and inputs; work on others is not in the way.

    Both folders exist then, and neither is a link. Call it within `exclusive`.
    """
    return own_folder(own_folder(directory / WORK) / fingerprint.removeprefix("sha256:")[:16])


def work_folders(directory: Path) -> list[Path]:
    """The folders that `work_directory` has made, without anything else that is beside them."""
    return [path for path in (directory / WORK).glob("*") if _WORK_NAME.fullmatch(path.name)]
