"""Keeps prepared data from being replaced while it is read.

A reader holds a shared lock on the folder of the data, and `prepare` holds an exclusive one while it puts new data there. The lock
is on the folder itself. So it needs no file, works in a folder that cannot be written to, and nobody can put a link in its place.
The kernel releases it when the process ends. It holds between all processes of a machine, in containers too. On a network file
system it may hold on one machine only.

A reader also leaves its name in `.readers`, if it can write there. Each name is locked by its reader, so that the name of a process
that was killed is not taken for one that still reads. Where the server of a network file system keeps locks, the names protect the
data from other machines.
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

__all__ = ["READERS", "reading", "replacing"]

READERS = ".readers"
"""The folder with the names of readers, inside that of the data."""
_MAX_NAMES, _MAX_NAME_BYTES = 256, 512
_SHOWN = 4  # names in a message


@contextmanager
def reading(directory: Path, name: str | None = None) -> Iterator[None]:
    """Holds prepared data against being replaced while the context lasts.

    Args:
        directory: of the data. If it cannot be opened, nothing is held, and whoever reads the data says why.
        name: what reads it, such as "run demo", for the message of a `prepare` that is refused; none leaves no name.

    Raises:
        PreparedDataError: `prepare` is replacing the data at this moment.
    """
    with _locked(directory, fcntl.LOCK_SH) as held:
        if not held:
            raise PreparedDataError(
                f"{directory}: `prepare` is replacing this data at this moment; run the same command again when it has ended"
            )
        with _named(directory, name):
            yield


@contextmanager
def replacing(directory: Path) -> Iterator[None]:
    """Holds a folder against new readers while the context lasts.

    Raises:
        ConfigError: somebody reads the data; the message names the readers that have left their name.
    """
    with _locked(directory, fcntl.LOCK_EX) as held:
        names = list(_readers(directory))
        if not held or names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            who = ", ".join(names[:_SHOWN]) + more or "another process (it has left no name)"
            raise ConfigError(
                f"{directory}: its data is in use by {who}, and was not replaced; wait for the end of that, or choose another "
                "--output (in containers: another DATA_NAME)"
            )
        yield


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[bool]:
    """Whether the lock was to be had at once; true where the folder or its file system cannot be locked at all."""
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
    """Locks an open file or folder without waiting; false if another one holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def _named(directory: Path, name: str | None) -> Iterator[None]:
    """Leaves a name, locked, where that is possible. One file for each name: the next attempt of a run that was killed takes it."""
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
        if not _is_locked(descriptor, fcntl.LOCK_EX):  # a second reader of this name
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
                folder.rmdir()  # unless others have their names there
    finally:
        os.close(descriptor)


def _readers(directory: Path) -> Iterator[str]:
    """The names that are locked; those of processes that have ended are removed."""
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
