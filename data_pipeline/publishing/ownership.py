"""Protects an output folder: one preparation writes to it at a time, and none replaces a foreign file.

A foreign file is one that no preparation has written, by `published.json`, the list of what they have written.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, SourceError, StorageError
from common.files import UnusableFileError, canonical_json, is_unfinished, own_folder, read_input, sync_upwards, write_atomic
from common.text import some_of
from data_pipeline.dataset.layout import FOLDERS, INPUTS, LOCK, MANIFEST, PUBLISHED, REJECTED, SINGLE_FILES, WORK
from data_pipeline.dataset.locks import DataInUseError
from data_pipeline.dataset.manifest import FAMILY
from data_pipeline.sources.listing import UnreadableSourceError

logger = logging.getLogger(__name__)
_WORK_NAME = re.compile("[0-9a-f]{16}")
_REJECTED_NAME = re.compile(r"[0-9]{6,}\.jsonl\.zst")
_NOTE_FORMAT = "published-files/1"
_MAX_NOTE_BYTES = 512 << 20
_MAY_PASS = (UnreadableSourceError, DataInUseError)  # refusals that the same settings and text may not meet again


@dataclass
class OutputFolder:
    directory: Path
    work: Path | None = None  # the folder of the stages' results. None before `start_work`.

    def start_work(self, fingerprint: str) -> Path:
        """Return the folder for the stages' results with these settings and inputs. A link in its place is refused."""
        self.work = own_folder(own_folder(self.directory / WORK) / fingerprint.removeprefix("sha256:")[:16])
        return self.work


@contextmanager
def exclusive(directory: Path) -> Iterator[OutputFolder]:
    """Lock a folder, and remove the unfinished files of a killed preparation. If it may succeed next time, its work stays."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        check_nothing_foreign(directory)
        directory.mkdir(parents=True, exist_ok=True)
        own_folder(directory / WORK)
        path = directory / LOCK
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UnusableFileError(f"{path} is not a regular file; remove it and run the same command again")
        # Opened last, because a failure of the other calls would leave it open.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+b")
    except UnusableFileError as error:
        raise ConfigError(f"{error}, or choose another --output") from None
    except (FileExistsError, NotADirectoryError):
        raise StorageError(
            f"{directory}: the folder cannot be created, because it or a parent is a file; choose another --output"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.path.samestat(os.fstat(file.fileno()), path.lstat())  # false if another process has removed the file
        except (BlockingIOError, FileNotFoundError):
            is_free = False
        if not is_free:
            raise StorageError(
                f"{directory}: another `prepare` is writing to it; wait until it ends, or choose another --output"
            ) from None
        # A killed preparation may have created the folder or moved files without flushing that to the device. Flush it now: files
        # that count as finished must not be lost in a power failure, and files that are removed must not come back.
        sync_upwards(directory)
        _clear_half_written(directory)
        folder = OutputFolder(directory)
        try:
            yield folder
        except BaseException as error:
            is_final = isinstance(error, ConfigError | SourceError) and not isinstance(error, _MAY_PASS)
            if is_final and folder.work is not None:
                shutil.rmtree(folder.work, ignore_errors=True)
            with suppress(OSError):
                (directory / WORK).rmdir()
            names = {LOCK, INPUTS} if is_final else {LOCK}
            with suppress(OSError):  # a folder is not empty, or the file system fails, which the error above reports
                if {path.name for path in directory.iterdir()} <= names:
                    for name in names:
                        (directory / name).unlink(missing_ok=True)
                    for path in missing:
                        path.rmdir()
            raise
        finally:
            with suppress(OSError):  # it is not empty
                (directory / WORK).rmdir()


def _clear_half_written(directory: Path) -> None:
    beside = [path for name in (MANIFEST, PUBLISHED, INPUTS) for path in directory.glob(f".{name}.*") if is_unfinished(path)]
    for path in beside:
        _remove(path)
    for work in work_folders(directory):
        strange = [work] if work.is_symlink() or not work.is_dir() else list(_strange_entries(work))
        for path in strange:
            _remove(path)
        if foreign := [path for path in strange if not is_unfinished(path)]:
            logger.warning("%s: removed, because no preparation writes such a file there", some_of(foreign))


def _strange_entries(folder: Path) -> Iterator[Path]:
    """Yield unfinished entries of a work folder, and those of the wrong kind: files of stages have an extension, folders none."""
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
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_nothing_foreign(directory: Path) -> None:
    """ConfigError: publishing would replace a foreign file."""
    found: list[str] = []
    for path in (directory / name for name in (*SINGLE_FILES, *FOLDERS)):
        if path.is_dir() and not path.is_symlink():
            inside = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
            found += sorted(file.relative_to(directory).as_posix() for file in inside)
        elif os.path.lexists(path):
            found.append(path.name)
    own = own_files(directory)
    if foreign := [name for name in found if name not in own]:
        raise ConfigError(
            f"{directory}: {some_of(foreign)} would be replaced, but `prepare` did not write it; choose another --output, "
            "or move it to another folder"
        )


def own_files(directory: Path) -> set[str]:
    """Return the files in a folder that preparations have written, according to the note and the manifest."""
    listed = set(noted_files(directory))
    manifest = _json_object(directory, MANIFEST) or {}  # it may have an older format, or be damaged
    with suppress(KeyError, TypeError, AttributeError):
        if manifest["format"].startswith(FAMILY):
            listed |= {*manifest["files"], *(shard["path"] for shard in manifest["shards"])}
    if listed:
        rejected = {f"{REJECTED}/{path.name}" for path in (directory / REJECTED).glob("*") if _REJECTED_NAME.fullmatch(path.name)}
        return {*listed, *SINGLE_FILES, *rejected}
    # Before anything is published, there is only the file that `remember_digests` writes, or an unfinished preparation.
    work, inputs = directory / WORK, _json_object(directory, INPUTS)
    is_at_work = work.is_dir() and not work.is_symlink() and all(_WORK_NAME.fullmatch(path.name) for path in work.iterdir())
    holds_digests = inputs is not None and all(name.startswith("sha256:") or name == "seal" for name in inputs)
    return {INPUTS} if holds_digests or is_at_work else set()


def _json_object(directory: Path, name: str) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no such file, or it has another content."""
    try:
        value = json.loads(read_input(directory / name, _MAX_NOTE_BYTES, below=directory))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def noted_files(directory: Path) -> dict[str, Any]:
    note = _json_object(directory, PUBLISHED) or {}
    files = note.get("files")
    return files if note.get("format") == _NOTE_FORMAT and isinstance(files, dict) else {}


def write_note(directory: Path, files: Mapping[str, Any]) -> None:
    write_atomic(directory / PUBLISHED, canonical_json({"format": _NOTE_FORMAT, "files": files}))


def work_folders(directory: Path) -> list[Path]:
    return [path for path in (directory / WORK).glob("*") if _WORK_NAME.fullmatch(path.name)]
