"""Reading and writing files safely: bounded reads of regular files, writes that a reader sees whole or not at all, digests.

A folder of data or of a run may come from a stranger. So nothing below it is opened through a symbolic link, and a pipe, device or
endless file in place of an expected file is an error, not a wait.

A power failure may keep any part of what was not forced to the device, in any order: a new name without the content behind it, or
the other way round. So everything that must survive one is written in this order: the content of each file (`sync_file`), the
entries of its folder (`sync_directory`), the rename that makes it visible, the entries of the folder with that name, and once, for
a folder that may be new, the entries of all folders above it (`sync_upwards`). `write_atomic` does this for a file,
`commit_directory` for a folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "UnusableFileError",
    "canonical_json",
    "commit_directory",
    "digest_bytes",
    "digest_file",
    "digest_stream",
    "is_unfinished",
    "open_input",
    "open_output",
    "own_folder",
    "parse_json",
    "plain",
    "read_input",
    "sealed",
    "sync_directory",
    "sync_file",
    "sync_upwards",
    "unfinished_path",
    "unsealed",
    "write_atomic",
]

MAX_VALUES = 1 << 20
"""Values that a JSON file may hold, unless its reader allows more."""
_READ_BYTES = 1 << 20
_UNFINISHED = re.compile(r"\..+\.\d+\.[0-9a-f]{16}\.tmp")
_NAMES_NO_FILE = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


class UnusableFileError(ValueError):
    """A file is not a regular file, is larger than its kind may be, or lies outside the folder that it belongs to."""


def open_input(path: Path, *, below: Path | None = None) -> BinaryIO:
    """A regular file, opened for reading; never waits for the other end of a pipe.

    Args:
        path: of the file.
        below: the folder that the file belongs to. From there on down no symbolic link is followed and `..` is refused; the
            folder itself may be reached through links. Without it, links are followed.

    Raises:
        UnusableFileError: it is no regular file, or a link or `..` leads to it.
        OSError: it does not exist or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags) if below is None else _open_below(below, path, flags)
    except OSError as error:
        if error.errno not in _NAMES_NO_FILE:
            raise
        raise UnusableFileError(f"{path} cannot be opened: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, UnusableFileError):
            raise
        raise UnusableFileError(f"{str(path)!r} is not the name of a file: {error}") from None
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise UnusableFileError(f"{path} is {_KINDS.get(kind, 'no regular file')}; a regular file is needed there")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: Path, max_bytes: int, *, below: Path | None = None) -> bytes:
    """The content of a regular file of at most `max_bytes`; see `open_input`.

    Raises:
        UnusableFileError: as `open_input`, or the file is larger.
        OSError: it does not exist or cannot be read.
    """
    with open_input(path, below=below) as file:
        is_larger = os.fstat(file.fileno()).st_size > max_bytes  # a file with holes can claim any size: nothing of it is read
        content = b"" if is_larger else file.read(max_bytes + 1)  # files in /proc and growing files have more than their size
    if is_larger or len(content) > max_bytes:
        raise UnusableFileError(f"{path} is larger than {max_bytes} bytes, the most that a file of its kind may have")
    return content


def open_output(path: Path, flags: int, *, below: Path) -> int:
    """A descriptor for writing to a file below a folder of the program; the file is created if it is missing.

    Args:
        path: of the file.
        flags: `os.O_WRONLY` or `os.O_RDWR`, and `os.O_APPEND`. Not `os.O_TRUNC`, which would cut before it is known what.
        below: the folder that the file belongs to; see `open_input`.

    Raises:
        UnusableFileError: it is no regular file, a link or `..` leads to it, or it has a second name (a hard link), so that what is
            written there would change a file elsewhere.
        OSError: it cannot be opened or created.
    """
    try:
        descriptor = _open_below(below, path, flags | os.O_CREAT | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # ENXIO: a pipe that nobody reads
            raise UnusableFileError(f"{path} is no regular file; remove it and run the same command again") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")
            raise UnusableFileError(f"{path} is {kind}; remove it and run the same command again")
        if status.st_nlink > 1:
            raise UnusableFileError(
                f"{path} has {status.st_nlink} names (hard links), and writing to it would change it under all of them; replace it "
                "by a copy and run the same command again"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def own_folder(path: Path) -> Path:
    """`path`, created if it is missing (not its parents).

    Raises:
        UnusableFileError: a symbolic link or a file has that name, so that what is written there would land elsewhere.
    """
    try:
        path.mkdir()
    except FileExistsError:
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind != stat.S_IFDIR:
            raise UnusableFileError(
                f"{path} is {_KINDS.get(kind, 'a file')}; a directory is needed there: remove it and run the same command again"
            ) from None
    return path


def _open_below(folder: Path, path: Path, flags: int) -> int:
    try:
        *parents, name = path.relative_to(folder).parts
    except ValueError:
        raise UnusableFileError(f"{path} lies outside {folder}, the folder that it belongs to") from None
    if ".." in (*parents, name):
        raise UnusableFileError(f"{path} leaves {folder}, the folder that it belongs to")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parents:
            inner = _open_entry(part, os.O_RDONLY | os.O_DIRECTORY, descriptor, path)
            os.close(descriptor)
            descriptor = inner
        return _open_entry(name, flags, descriptor, path)
    finally:
        os.close(descriptor)


def _open_entry(name: str, flags: int, folder: int, path: Path) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except OSError as error:
        try:
            kind = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            kind = stat.S_IFREG
        if kind in (stat.S_IFLNK, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            raise UnusableFileError(f"{path}: {name} is {_KINDS[kind]}, which is not opened inside a data or run folder") from None
        raise OSError(error.errno, error.strerror, str(path)) from None


def canonical_json(value: Any) -> bytes:
    """`value` as JSON in its one form: sorted keys, UTF-8, two-space indent, final newline; refuses NaN and infinity.

    Raises:
        ValueError: a number is not finite, so other readers could not parse it.
    """
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=2) + "\n").encode()


def digest_bytes(data: bytes) -> str:
    """`sha256:` and the hexadecimal digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def sealed(value: dict[str, Any]) -> bytes:
    """`value` as canonical JSON that carries its own digest, under the key `seal`, over the rest."""
    return canonical_json(value | {"seal": digest_bytes(canonical_json(value))})


def parse_json(data: bytes, max_values: int = MAX_VALUES) -> Any:
    """The value that JSON text holds; takes at most some hundred bytes of memory for each of `max_values`.

    Raises:
        ValueError: it is no JSON, holds more values, or nests them too deeply.
    """
    if (found := sum(map(data.count, (b",", b"[", b"{")))) > max_values:  # commas in texts count too: a bound, no exact number
        raise ValueError(f"up to {found} values, more than {max_values} that a file of this kind may hold")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def unsealed(data: bytes) -> dict[str, Any]:
    """What `sealed` was given, if not one byte has changed since.

    Raises:
        ValueError: this is not sealed JSON, or it was changed.
    """
    value = parse_json(data)
    if not isinstance(value, dict) or "seal" not in value:
        raise ValueError("it carries no seal")
    content = {key: entry for key, entry in value.items() if key != "seal"}
    try:
        if sealed(content) != data:
            raise ValueError("its content does not match its seal")
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    return content


def digest_file(path: Path, *, below: Path | None = None) -> str:
    """`sha256:` and the hexadecimal digest of a regular file's content, read in pieces of 1 MiB; `below` as in `open_input`.

    Raises:
        UnusableFileError: as `open_input`.
        OSError: it does not exist or cannot be read.
    """
    with open_input(path, below=below) as file:
        return digest_stream(file)


def digest_stream(file: BinaryIO) -> str:
    """`sha256:` and the hexadecimal digest of what is left to read of an open file."""
    digest = hashlib.sha256()
    while chunk := file.read(_READ_BYTES):
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def sync_file(path: Path) -> None:
    """Forces a file's content to the storage device. A failure is not retried: after one the kernel may have dropped the pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Forces a directory's entries to the storage device, so that a rename in it survives a power failure."""
    sync_file(path)


def sync_upwards(path: Path) -> None:
    """Forces the entries of a directory, and of those above it up to the mount point, to the storage device: its name stays.

    It does so whether or not this process has created any of them: one that was killed may have. It ends below a directory that
    this user may not read.
    """
    folder = path.resolve()
    sync_directory(folder)
    while not folder.is_mount():
        folder = folder.parent
        try:
            sync_directory(folder)
        except PermissionError:
            return


def unfinished_path(path: Path) -> Path:
    """A fresh name beside `path` that nobody can predict: for what becomes `path` when it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


def is_unfinished(path: Path) -> bool:
    """Whether this is the name of something that a process still writes, or wrote when it was killed."""
    return _UNFINISHED.fullmatch(path.name) is not None


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by `data`: temporary file, fsync, rename, fsync of the directory.

    Without `durable` nothing is forced to the device. After a power failure the file may be old, new, missing or damaged, so that
    its reader has to check it against a digest.
    """
    temporary = unfinished_path(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def commit_directory(temporary: Path, final: Path) -> None:
    """Gives a finished directory its final name, durably: fsync of every file and directory in it, rename, fsync of the parent.

    Raises:
        OSError: `final` exists and is not empty, or a file could not be forced to the device.
    """
    for folder, _, names in os.walk(temporary):
        for name in names:
            sync_file(Path(folder, name))
        sync_directory(Path(folder))
    temporary.rename(final)
    sync_directory(final.parent)


def plain(value: Any) -> Any:
    """A value for JSON, which has no word for a number that is not finite; a text keeps it visible for every parser."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value
