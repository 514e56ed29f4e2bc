"""Gives finished data its place: built beside the old, swapped in, the manifest last: a reader finds old, new, or none."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_pipeline.errors import PreparedDataError, StorageError
from data_pipeline.files import commit_directory, is_unfinished, sync_directory, write_atomic
from data_pipeline.manifest import MANIFEST, Manifest, read_manifest
from data_pipeline.published import CHOSEN, TOKENS

__all__ = [
    "CARD",
    "INPUTS",
    "REJECTS",
    "REPORT",
    "REPORT_PAGE",
    "TIMINGS",
    "TOKENIZER",
    "clear_work",
    "exclusive",
    "find_finished",
    "json_lines",
    "publish",
    "work_directory",
]

INPUTS, REJECTS, REPORT, REPORT_PAGE, CARD = "inputs.json", "rejects.jsonl", "report.json", "report.html", "DATA_CARD.md"
TIMINGS, TOKENIZER = "timings.json", "tokenizer"
_NOT_ALWAYS_WRITTEN = (REJECTS, TOKENS, CHOSEN)
_WORK = ".work"
_LOCK = ".prepare.lock"


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds a folder against a second preparation at the same time, and removes what a killed one left half written.

    Raises:
        StorageError: another one is at work in it, or it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("a")
    except (FileExistsError, NotADirectoryError):
        raise StorageError(f"{directory}: a file stands where the output folder should be; choose another --output") from None
    except PermissionError as error:
        raise StorageError(f"{error.filename}: no permission to write; give this user access, or choose another --output") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{directory}: another `prepare` is writing to it; wait for its end, or choose another --output"
            ) from None
        for path in [path for path in (*directory.glob(".*"), *(directory / _WORK).rglob(".*")) if is_unfinished(path)]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        yield


def find_finished(directory: Path, fingerprint: str, *, with_rejects: bool) -> Manifest | None:
    """The manifest of a folder that already holds what these settings and inputs give, every file in its place with its size."""
    try:
        manifest = read_manifest(directory)
    except PreparedDataError:
        return None
    complete = all(_size(directory / shard.path) == shard.bytes for shard in manifest.shards)
    complete &= all((directory / name).is_file() for name in manifest.files)
    complete &= (directory / REJECTS).is_file() or not with_rejects
    return manifest if complete and manifest.fingerprint == fingerprint else None


def work_directory(directory: Path, fingerprint: str) -> Path:
    """Where the stages leave their results for these settings and inputs; work on others is not in the way."""
    return directory / _WORK / fingerprint.removeprefix("sha256:")[:16]


def clear_work(directory: Path) -> None:
    """Removes the stages' results, of any settings: once data is published they have no use."""
    shutil.rmtree(directory / _WORK, ignore_errors=True)


def publish(
    directory: Path,
    work: Path,
    manifest: Manifest,
    shards: Mapping[str, Path],
    files: Mapping[str, Path | bytes],
) -> Manifest:
    """Puts shards and files in their place under `directory`, replaces what an earlier preparation left, and removes the work.

    Returns the manifest with its root digest. Killed at any point, running it again completes it: until the work is removed, the
    stages' results stay where they are, as links to the same bytes.
    """
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
    _swap(built, directory)
    write_atomic(directory / MANIFEST, manifest_bytes)
    clear_work(directory)
    return sealed


def _swap(built: Path, directory: Path) -> None:
    """Moves everything in `built` into `directory`, in the place of what has the same name there."""
    outgoing = built.with_name("outgoing")
    shutil.rmtree(outgoing, ignore_errors=True)
    outgoing.mkdir()
    ready = built.with_name("ready")
    shutil.rmtree(ready, ignore_errors=True)
    commit_directory(built, ready)
    # From here until the new manifest is written the folder holds no prepared data, and says so.
    for name in (MANIFEST, *dict.fromkeys((*_NOT_ALWAYS_WRITTEN, *sorted(os.listdir(ready))))):  # noqa: PTH208 - names are wanted
        if (directory / name).exists():
            (directory / name).rename(outgoing / name)
    sync_directory(directory)
    for name in sorted(os.listdir(ready)):  # noqa: PTH208
        (ready / name).rename(directory / name)
    sync_directory(directory)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def json_lines(values: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object a line."""
    return b"".join(json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n" for value in values)
