"""Safe access to files: bounded reads of regular files, atomic writes, digests.

A folder may come from a stranger: no file below it is opened through a symbolic link, and no read waits for a pipe or a device.

A power failure may keep any part of the data that was not yet forced to the device, in any order. So the order of writes is:

1. the content of each file (`sync_file`) and the entries of its folder (`sync_directory`)
2. the rename that makes it visible, and the entries of the folder that holds the new name
3. once, for a folder that may be new, the entries of all folders above it (`sync_upwards`)
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
from typing import Any, BinaryIO, Protocol

MAX_VALUES = 1 << 20  # of a JSON file
MAX_DEPTH = 100  # of lists and objects in a JSON file
_READ_BYTES = 1 << 20
_UNFINISHED = re.compile(r"\..+\.(\d+)\.[0-9a-f]{16}\.tmp")
_NAMES_NO_FILE = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class UnusableFileError(ValueError):
    """A file is not a regular file, is larger than the limit for its kind, or lies outside the folder that it belongs to."""


def open_input(path: Path, *, below: Path | None = None) -> BinaryIO:
    """Open a file without waiting for a pipe. UnusableFileError: it is not regular, or a link or `..` is below `below`."""
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
            raise UnusableFileError(f"{path} is {_KINDS.get(kind, 'not a regular file')}; a regular file is needed there")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: Path, max_bytes: int, *, below: Path | None = None) -> bytes:
    with open_input(path, below=below) as file:
        is_larger = os.fstat(file.fileno()).st_size > max_bytes  # a sparse file can have any size, so none of it is read
        content = b"" if is_larger else file.read(max_bytes + 1)  # files in /proc and growing files hold more than their size
    if is_larger or len(content) > max_bytes:
        raise UnusableFileError(f"{path} is larger than {max_bytes} bytes, the limit for a file of this kind")
    return content


def open_output(path: Path, flags: int, *, below: Path) -> int:
    """Open a file below a folder for writing, created if missing; return its descriptor. UnusableFileError as for `open_input`.

    A file with a second name (a hard link) is refused too. `flags` has no `os.O_TRUNC`, which would empty it before the checks.
    """
    try:
        descriptor = _open_below(below, path, flags | os.O_CREAT | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # ENXIO: a pipe without a reader
            raise UnusableFileError(f"{path} is not a regular file; remove it and run the same command again") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
            raise UnusableFileError(f"{path} is {kind}; remove it and run the same command again")
        if status.st_nlink > 1:
            raise UnusableFileError(
                f"{path} has {status.st_nlink} names (hard links), and a write would change the file under all names; replace it "
                "by a copy and run the same command again"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def own_folder(path: Path) -> Path:
    """Create the folder `path` if it is missing, but not its parents. A link or a file of that name raises UnusableFileError."""
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


def canonical_json(value: Any, *, indent: int | None = 2) -> bytes:
    """Return JSON with sorted keys and a final newline; one line without indent. NaN and infinity raise ValueError."""
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=indent) + "\n").encode()


def digest_bytes(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def sealed(value: dict[str, Any], *, indent: int | None = 2) -> bytes:
    """Return `value` as canonical JSON. The key `seal` holds the digest of all other keys."""
    return canonical_json(value | {"seal": digest_bytes(canonical_json(value, indent=indent))}, indent=indent)


def parse_json(data: bytes, *, unique: bool = False) -> Any:
    """Return the value of a JSON text. ValueError: too many values, too deep, or with `unique` a name stands twice in an object."""
    if (found := sum(map(data.count, (b",", b"[", b"{")))) > MAX_VALUES:  # an upper bound: commas inside of strings count too
        raise ValueError(f"up to {found} values; a file of this kind may hold at most {MAX_VALUES}")
    try:
        value = json.loads(data, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        value = None
    else:
        if not is_deeper(value):
            return value
    raise ValueError(f"its values are nested too deeply; at most {MAX_DEPTH} levels are allowed")


def is_deeper(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    level = [value]
    for _ in range(max_depth + 1):
        containers = [one for one in level if isinstance(one, list | dict)]
        if not containers:
            return False
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is there twice")
        values[name] = value
    return values


def unsealed(data: bytes, *, indent: int | None = 2) -> dict[str, Any]:
    """Return the value that was given to `sealed` with the same `indent`. ValueError: it is not sealed, or a byte has changed."""
    value = parse_json(data)
    if not isinstance(value, dict) or "seal" not in value:
        raise ValueError("it carries no seal")
    content = {key: entry for key, entry in value.items() if key != "seal"}
    if sealed(content, indent=indent) != data:
        raise ValueError("its content does not match the digest that it holds")
    return content


def digest_file(path: Path, *, below: Path | None = None) -> str:
    with open_input(path, below=below) as file:
        return digest_stream(file)


def digest_stream(file: _Readable) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_READ_BYTES):
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def sync_file(path: Path) -> None:
    """Force a file's content to the storage device. A failure is not retried, because the kernel may have dropped the pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    sync_file(path)


def sync_upwards(path: Path) -> None:
    """Force the entries of a directory to the device, and of its parents up to the mount point or one without access."""
    folder = path.resolve()
    sync_directory(folder)
    while not folder.is_mount():
        folder = folder.parent
        try:
            sync_directory(folder)
        except PermissionError:
            return


def unfinished_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


def is_unfinished(path: Path) -> bool:
    return _UNFINISHED.fullmatch(path.name) is not None


def left_unfinished(path: Path) -> bool:
    """Whether the process that began to write an unfinished file has ended, as far as this machine knows."""
    match = _UNFINISHED.fullmatch(path.name)
    return match is not None and not Path("/proc", match[1]).exists()


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file atomically. Without `durable` a power failure may damage it, so its reader has to compare a digest."""
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
    """Raises OSError if `final` exists and is not empty."""
    for folder, _, names in os.walk(temporary):
        for name in names:
            sync_file(Path(folder, name))
        sync_directory(Path(folder))
    temporary.rename(final)
    sync_directory(final.parent)


def plain(value: Any, digits: int | None = None) -> Any:
    """Return a copy of a value for JSON, with `digits` decimal places. Numbers that are not finite become strings, because JSON
    cannot represent them.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return value if digits is None else round(value, digits)
    if isinstance(value, Mapping):
        return {name: plain(part, digits) for name, part in value.items()}
    return [plain(part, digits) for part in value] if isinstance(value, (list, tuple)) else value
