"""Locks that prevent `prepare` from replacing data while a process reads it.

A lock is on the folder itself: shared for a reader, exclusive for `prepare` while it writes. It needs no file, and the kernel
releases it when the process ends. On a network file system it may be limited to one machine. So each reader also writes its name
to `.readers` if it can, and locks that file: a killed process does not count.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from common.errors import ConfigError, PreparedDataError
from common.files import UnusableFileError, digest_bytes, open_input, open_output, own_folder
from common.text import some_of

READERS = ".readers"  # folder with the names of readers, inside the folder of the data
_MAX_NAMES, _MAX_NAME_BYTES = 256, 512
_SHOWN = 4  # maximum number of names in a message


class DataInUseError(ConfigError):
    """Other data would replace data that another process reads."""


@contextmanager
def reading(directory: Path, name: str | None = None) -> Iterator[None]:
    """A `prepare` that is refused shows `name`, such as "run demo". A folder that cannot be opened is not locked."""
    with _locked(directory, fcntl.LOCK_SH) as held:
        if not held:
            raise PreparedDataError(
                f"{directory}: `prepare` is replacing this data now; run the same command again when it has ended"
            )
        with _named(directory, name):
            yield


@contextmanager
def replacing(directory: Path) -> Iterator[None]:
    """DataInUseError if another process reads the data."""
    with _locked(directory, fcntl.LOCK_EX) as held:
        names = list(_readers(directory))
        if not held or names:
            who = some_of(names, _SHOWN) or "another process (its name is unknown)"
            raise DataInUseError(
                f"{directory}: its data is in use by {who}, and was not replaced; wait until that program ends, or choose another "
                "--output (in containers: another DATA_NAME)"
            )
        yield


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[bool]:
    """Yield whether the lock was free. True also if the folder or its file system cannot be locked at all."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield True
        return
    try:
        yield _is_locked(descriptor, kind)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        return True
    return True


@contextmanager
def _named(directory: Path, name: str | None) -> Iterator[None]:
    """Write and lock a file with the reader's name, if possible. A restart of a killed run uses the same file again."""
    folder = directory / READERS
    path = folder / digest_bytes((name or "").encode(errors="surrogateescape")).removeprefix("sha256:")[:16]
    descriptor = None
    if name is not None:
        with suppress(OSError, UnusableFileError):
            own_folder(folder)
            descriptor = open_output(path, os.O_RDWR, below=directory)
    if descriptor is None:
        yield
        return
    try:
        if not _is_locked(descriptor, fcntl.LOCK_EX):  # a second reader with this name
            yield
            return
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            text = f"{name}, process {os.getpid()} on {socket.gethostname()}"
            os.write(descriptor, text.encode(errors="replace")[:_MAX_NAME_BYTES])
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                folder.rmdir()  # fails if it contains other names
    finally:
        os.close(descriptor)


def _readers(directory: Path) -> Iterator[str]:
    folder = directory / READERS
    if folder.is_symlink():
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, _MAX_NAMES):
            with suppress(OSError, UnusableFileError), open_input(folder / entry.name, below=directory) as file:
                if _is_locked(file.fileno(), fcntl.LOCK_SH):
                    (folder / entry.name).unlink()
                else:
                    yield file.read(_MAX_NAME_BYTES).decode(errors="replace")
        folder.rmdir()
