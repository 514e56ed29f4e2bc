"""Gives finished data its place: built beside the old, swapped in, the manifest last: a reader finds old, new, or none."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import PreparedDataError
from common.files import (
    UnusableFileError,
    commit_directory,
    digest_file,
    open_input,
    sync_directory,
    write_atomic,
)
from data_pipeline.dataset.layout import CHOSEN, MANIFEST, REJECTS, TOKENS, WORK
from data_pipeline.dataset.locks import replacing
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.publishing.ownership import check_nothing_foreign, noted_files, own_files, work_folders, write_note

__all__ = ["find_finished", "json_lines", "publish", "settle"]

logger = logging.getLogger(__name__)
_NOT_ALWAYS_WRITTEN = (REJECTS, TOKENS, CHOSEN)


def find_finished(directory: Path, fingerprint: str, *, with_rejects: bool) -> Manifest | None:
    """The manifest of a folder that already holds what these settings and inputs give, every file in its place and undamaged.

    A file that is as the note says is not read: a terabyte would take an hour. Of any other the digest decides.
    """
    try:
        manifest = read_manifest(directory)
    except PreparedDataError:
        return None
    if manifest.fingerprint != fingerprint or (with_rejects and _state(directory, REJECTS) is None):
        return None
    noted = noted_files(directory)
    for name, digest in manifest.digests.items():
        state = _state(directory, name)
        if state is None or (state != noted.get(name) and not _matches(directory, name, digest)):
            logger.warning("%s: missing or damaged since it was published; all is prepared again", directory / name)
            return None
    return manifest


def settle(directory: Path, manifest: Manifest) -> None:
    """Removes the work of published data, and notes its files as they are, so that they need not be read to be known again."""
    clear_work(directory)  # first: a file that loses one of its names has another time of change
    files = {name: _state(directory, name) for name in manifest.digests}
    if files != noted_files(directory):
        write_note(directory, files)


def clear_work(directory: Path) -> None:
    """Removes the stages' results, of any settings: once data is published they have no use."""
    for work in work_folders(directory):
        shutil.rmtree(work, ignore_errors=True)
    with suppress(OSError):  # it is not there, or holds something else
        (directory / WORK).rmdir()


def publish(
    directory: Path,
    work: Path,
    manifest: Manifest,
    shards: Mapping[str, Path],
    files: Mapping[str, Path | bytes],
) -> Manifest:
    """Puts shards and files in their place under `directory`, replaces what an earlier preparation left, and removes the work.

    Returns the manifest with its root digest. Killed at any point, running it again completes it: until the work is removed, the
    stages' results stay where they are, as links to the same bytes, and the note says what in the folder is a preparation's.

    Raises:
        ConfigError: files of somebody else's would be replaced, or the data there is in use.
    """
    check_nothing_foreign(directory)
    built = work / "final"
    shutil.rmtree(built, ignore_errors=True)
    sealed, manifest_bytes = manifest.sealed()
    for name, content in {**shards, **files}.items():
        target = built / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            _link(content, target)
    for split in ("train", "val"):
        (built / split).mkdir(exist_ok=True)
    with replacing(directory):
        write_note(directory, dict.fromkeys({*own_files(directory), *shards, *files}))
        _swap(built, directory)
        write_atomic(directory / MANIFEST, manifest_bytes)
        settle(directory, sealed)
    return sealed


def _swap(built: Path, directory: Path) -> None:
    """Moves everything in `built` into `directory`, in the place of what has the same name there."""
    outgoing = built.with_name("outgoing")
    shutil.rmtree(outgoing, ignore_errors=True)
    outgoing.mkdir()
    ready = built.with_name("ready")
    shutil.rmtree(ready, ignore_errors=True)
    commit_directory(built, ready)
    # From here until the new manifest is written the folder holds no prepared data, and says so, before anything else goes: a power
    # failure could keep the manifest and lose what it names.
    names = sorted(os.listdir(ready))  # noqa: PTH208 - names are wanted
    _move((MANIFEST,), directory, outgoing)
    sync_directory(directory)
    _move((*_NOT_ALWAYS_WRITTEN, *names), directory, outgoing)
    _move(names, ready, directory)
    sync_directory(directory)


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    """Moves those of the names that there are from one folder to another, where they must not be yet."""
    for name in names:
        if os.path.lexists(source / name):
            (source / name).rename(target / name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _state(directory: Path, name: str) -> list[int] | None:
    """Size and times of a file, which change when it is written to; None if it does not exist or is a link."""
    try:
        with open_input(directory / name, below=directory) as file:
            status = os.fstat(file.fileno())
    except (OSError, UnusableFileError):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _matches(directory: Path, name: str, digest: str) -> bool:
    try:
        return digest_file(directory / name, below=directory) == digest
    except (OSError, UnusableFileError):  # a device that cannot read it, which writing it again may mend
        return False


def json_lines(values: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object a line."""
    return b"".join(json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n" for value in values)
