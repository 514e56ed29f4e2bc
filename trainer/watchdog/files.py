"""The files of heartbeats and stacks in a run. No file is opened through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_BEAT_BYTES = 4096


def clear_heartbeats(run: Path) -> None:
    """Only rank 0 calls this, before any rank writes its heartbeat."""
    with opened_folder(run / "heartbeat") as folder:
        for name in os.listdir(folder):  # noqa: PTH208 - the open directory, even if another has its name now
            if name.startswith("rank-"):
                os.unlink(name, dir_fd=folder)


def remove_heartbeat(run: Path, rank: int) -> None:
    """Remove the heartbeat of a rank that has ended, so that other nodes do not wait for it."""
    with opened_folder(run / "heartbeat") as folder, suppress(FileNotFoundError):
        os.unlink(heartbeat_file(run, rank).name, dir_fd=folder)


def heartbeat_file(run: Path, rank: int) -> Path:
    return run / "heartbeat" / f"rank-{rank}"


def stacks_file(run: Path, rank: int) -> Path:
    return run / "stacks" / f"rank-{rank}.txt"


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor. It is created if it is missing; a link to a folder is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        raise _in_the_way(path, "directory") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_to_append(path: Path) -> int:
    """Open a regular file for appending and return its descriptor. It is created if it is missing; links are refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with opened_folder(path.parent) as folder:
        try:
            descriptor = os.open(path.name, flags, 0o644, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _in_the_way(path, "regular file") from None
            raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _in_the_way(path, "regular file with one name")
    return descriptor


def read_beat(path: Path) -> bytes:
    """Return the first 4096 bytes of a file. Links are refused; this never waits for the other end of a pipe."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        return os.read(descriptor, MAX_BEAT_BYTES)
    finally:
        os.close(descriptor)


def _in_the_way(path: Path, wanted: str) -> OSError:
    return OSError(f"{path} is not a {wanted} (links are not allowed); remove it and run the same command again")
