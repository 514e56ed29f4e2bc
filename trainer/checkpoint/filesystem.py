"""The file operations of the checkpoint store: one method for each system call, and functions that combine them.

The store touches files only through this module, so that a test can make any single operation fail, stop or be lost.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from common.errors import ConfigError
from common.hardware import available_host_bytes

_CHUNK_BYTES = 16 << 20
_SMALL_BYTES = 256 << 20  # every machine has this much; querying the free memory takes longer than reading a small file


class Storage:
    """A file system. Every method may raise OSError."""

    def names(self, directory: Path) -> list[str]:
        """Return the names of the entries of a directory, sorted. Refuses a symbolic link."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return sorted(os.listdir(descriptor))  # noqa: PTH208 - the names in the directory that was opened
        finally:
            os.close(descriptor)

    def is_directory(self, path: Path) -> bool:
        """Return True if `path` is a directory and not a symbolic link to one."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def open(self, path: Path) -> int:
        """Return a descriptor for reading a file. Refuses a symbolic link, and does not block on a named pipe."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def open_directory(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def size(self, descriptor: int) -> int:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def read_into(self, descriptor: int, buffer: memoryview) -> int:
        """Read into the beginning of `buffer` and return the number of bytes; 0 at the end of the file."""
        return os.readv(descriptor, [buffer])

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write the beginning of `data` and return the number of bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory atomically. Replaces an existing file."""
        os.rename(source, target)  # noqa: PTH104 - the system call itself

    def unlink(self, path: Path) -> None:
        os.unlink(path)  # noqa: PTH108 - the system call itself

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)  # noqa: PTH102 - the system call itself

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)  # noqa: PTH106 - the system call itself


def write_all(storage: Storage, descriptor: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        count = storage.write(descriptor, data[written : written + _CHUNK_BYTES])
        if count <= 0:
            raise OSError(errno.EIO, "a write call wrote no bytes")
        written += count


def write_file(storage: Storage, path: Path, data: bytes) -> None:
    """Write a new file and sync it. A failed fsync is not retried, because the kernel may have dropped the pages."""
    descriptor = storage.create(path)
    try:
        write_all(storage, descriptor, memoryview(data))
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def read_file(storage: Storage, path: Path, max_bytes: int) -> bytearray:
    """Raises OSError for an irregular file, ValueError if it is larger or shrinks, ConfigError if it exceeds the free memory."""
    descriptor = storage.open(path)
    try:
        num_bytes = storage.size(descriptor)
        if num_bytes > max_bytes:
            raise ValueError(f"{num_bytes} bytes, more than the allowed {max_bytes}")
        if num_bytes >= _SMALL_BYTES and num_bytes > (free := available_host_bytes()):  # a sparse file can have any size
            raise ConfigError(  # this is not damage, so the checkpoint is not set aside
                f"{path}: has {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free; use a machine with more "
                "memory, or another checkpoint"
            )
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
    """Force the entries of a directory to the device, so that renames and removals in it survive a power failure."""
    descriptor = storage.open_directory(path)
    try:
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def make_directories(storage: Storage, path: Path) -> None:
    """Create a directory and its missing parents, and sync the folders that contain them."""
    try:
        storage.make_directory(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_directories(storage, path.parent)
        storage.make_directory(path)
    sync_directory(storage, path.parent)


def remove_directory(storage: Storage, path: Path) -> None:
    """Remove a directory with its content, or a link or file of that name."""
    if not storage.is_directory(path):
        storage.unlink(path)
        return
    for name in storage.names(path):
        remove_directory(storage, path / name)
    storage.remove_directory(path)
