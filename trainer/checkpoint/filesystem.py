"""The file operations of the checkpoint store: one method for each system call, and what is made of them.

Nothing else in this package touches a file, so that a test can make any single operation fail, stop or be forgotten; `space` only
looks at what they take.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from common.errors import ConfigError
from common.host_memory import available_host_bytes

__all__ = ["Storage", "make_directories", "read_file", "remove_directory", "sync_directory", "write_all", "write_file"]

_CHUNK_BYTES = 16 << 20
_SMALL_BYTES = 256 << 20  # what any machine has; asking the system for its memory takes longer than reading small files


class Storage:
    """A file system. Every method may raise OSError."""

    def names(self, directory: Path) -> list[str]:
        """What is in a directory, sorted by name; a link to one is refused."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return sorted(os.listdir(descriptor))  # noqa: PTH208 - names are what is wanted, of this very directory
        finally:
            os.close(descriptor)

    def is_directory(self, path: Path) -> bool:
        """True where `path` is a directory itself, not a link to one."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def open(self, path: Path) -> int:
        """A descriptor for reading a file; links are refused and a named pipe does not block."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def open_directory(self, path: Path) -> int:
        """A descriptor for syncing a directory."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def size(self, descriptor: int) -> int:
        """The bytes of a regular file."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def read_into(self, descriptor: int, buffer: memoryview) -> int:
        """Fills a part of `buffer` and returns how many bytes; 0 at the end of the file."""
        return os.readv(descriptor, [buffer])

    def create(self, path: Path) -> int:
        """A descriptor for writing a file that is not there yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Writes a part of `data` and returns how many bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Forces a file's content, or a directory's entries, to the device."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Gives a descriptor back."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or directory another name at once; a file of that name is replaced."""
        os.rename(source, target)  # noqa: PTH104 - the system call itself

    def unlink(self, path: Path) -> None:
        """Removes a file or a link."""
        os.unlink(path)  # noqa: PTH108 - the system call itself

    def make_directory(self, path: Path) -> None:
        """Creates a directory that is not there yet."""
        os.mkdir(path)  # noqa: PTH102 - the system call itself

    def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
        os.rmdir(path)  # noqa: PTH106 - the system call itself


def write_all(storage: Storage, descriptor: int, data: memoryview) -> None:
    """Writes all of `data`, in pieces, because one call may take less than it is given."""
    written = 0
    while written < len(data):
        count = storage.write(descriptor, data[written : written + _CHUNK_BYTES])
        if count <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        written += count


def write_file(storage: Storage, path: Path, data: bytes) -> None:
    """Writes a new file and forces it to the device. A failed fsync is not retried: the kernel may have dropped the pages."""
    descriptor = storage.create(path)
    try:
        write_all(storage, descriptor, memoryview(data))
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def read_file(storage: Storage, path: Path, max_bytes: int) -> bytearray:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or it is no regular file.
        ValueError: it has more than `max_bytes`, or became shorter meanwhile.
        ConfigError: it does not fit the memory of this machine.
    """
    descriptor = storage.open(path)
    try:
        num_bytes = storage.size(descriptor)
        if num_bytes > max_bytes:
            raise ValueError(f"{num_bytes} bytes, more than the {max_bytes} that are allowed")
        _check_memory(path, num_bytes)
        content = bytearray(num_bytes)
        view = memoryview(content)
        filled = 0
        while filled < num_bytes:
            count = storage.read_into(descriptor, view[filled : filled + _CHUNK_BYTES])
            if count == 0:
                raise ValueError(f"it ended after {filled} of {num_bytes} bytes")
            filled += count
        return content
    finally:
        storage.close(descriptor)


def sync_directory(storage: Storage, path: Path) -> None:
    """Forces a directory's entries to the device, so that what was renamed or removed in it stays so."""
    descriptor = storage.open_directory(path)
    try:
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def make_directories(storage: Storage, path: Path) -> None:
    """Creates a directory, and those above it that are missing, and forces their names to the device."""
    try:
        storage.make_directory(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_directories(storage, path.parent)
        storage.make_directory(path)
    sync_directory(storage, path.parent)


def remove_directory(storage: Storage, path: Path) -> None:
    """Removes a directory with the files in it, or the link or file that has its name."""
    if not storage.is_directory(path):
        storage.unlink(path)
        return
    for name in storage.names(path):
        remove_directory(storage, path / name)
    storage.remove_directory(path)


def _check_memory(path: Path, num_bytes: int) -> None:
    """Refuses to read more than this machine has memory left for: a file with holes can have any size, and take no space.

    Raises:
        ConfigError: the bytes do not fit. It is no damage, so nothing is set aside because of it.
    """
    if num_bytes >= _SMALL_BYTES and num_bytes > (free := available_host_bytes()):
        raise ConfigError(
            f"{path}: {num_bytes / 1e9:.1f} GB are to be read, and {free / 1e9:.1f} GB of memory are free; use a larger machine, "
            "or another checkpoint"
        )
