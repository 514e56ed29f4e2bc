"""Files where they are: on this machine, or in any store that fsspec knows (`s3://`, `gs://`, `hf://`, `http://`, …).

Reading from a store is tried again after a failure, from the byte where it failed, with growing waits. A store's own errors can
quote the address with whatever secrets it holds, so they are never shown: messages name the kind of error and the bare address.

A file of this machine is known by its content. One in a store is known by its size and the checksum that the store keeps (SHA-256,
MD5, CRC32C or entity tag), or else the time of its last change, so that a terabyte is not downloaded only to be recognised.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from data_pipeline.config import LimitSettings
from data_pipeline.errors import SourceError
from data_pipeline.sources.formats import is_hidden, printable
from data_pipeline.sources.streams import Readable

__all__ = [
    "Found",
    "Listing",
    "Location",
    "check_unchanged",
    "digest",
    "files_below",
    "found_here",
    "is_url",
    "list_files",
    "open_file",
]

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 30.0
_STORE_BLOCK_BYTES = 4 << 20  # what a store is asked for at a time; their own default can be 50 MiB for each open file
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface-hub", "http": "aiohttp", "https": "aiohttp"}
_GONE = (404, 410)  # HTTP status codes
_SHOWN = 8  # names in a message

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class Location:
    """Where a file is. As text it holds no credentials and no query, so it may stand in any message."""

    name: str
    """A path on this machine, or the store's name of the file."""
    store: str = ""
    """The URL that the user named, which opens the store; empty for this machine. It may hold secrets."""

    def __str__(self) -> str:
        return printable(_bare(self.name, self.store.partition("://")[0])) if self.store else self.name

    __repr__ = __str__


@dataclass(frozen=True)
class Found:
    """A file that is there."""

    location: Location
    path: str
    """Relative to what was named, with forward slashes."""
    bytes: int
    stamp: str
    """What changes when the file does: the time of its last change, or the checksum of a store."""
    checksum: str = ""
    """`algorithm:value` as the store has it; empty where content must be read to know it."""
    status_stamp: str = ""
    """Time of the last change to anything about a file of this machine, its name and the stamp above among it: nobody sets it."""


@dataclass(frozen=True)
class Listing:
    """What a name stands for."""

    root: str
    """The folder that paths are relative to, or the file itself; without secrets."""
    files: Sequence[Found]
    is_folder: bool
    """Whether they are whatever a folder holds, and not named by themselves or by a pattern."""


def is_url(named: str) -> bool:
    """Whether a name is that of a store and not of this machine."""
    return "://" in named and not named.startswith("file://")


def list_files(named: str, limits: LimitSettings) -> Listing:
    """All files of a folder, a file, or what matches a pattern; none where there is nothing of this name.

    Raises:
        SourceError: the store cannot be reached, refuses access, or needs a package that is not installed.
    """
    return _list_store(named, limits) if is_url(named) else _list_local(named.removeprefix("file://"))


def check_unchanged(location: Location, num_bytes: int, stamp: str, limits: LimitSettings) -> None:
    """Refuses a file that is not the one that was found when the preparation began.

    Raises:
        SourceError: it changed or is gone.
    """
    try:
        if location.store:
            found = _found_in_store(_store(location.store), location, limits)
            now = (found.bytes, found.stamp)
        else:
            status = Path(location.name).stat()
            now = (status.st_size, str(status.st_mtime_ns))
    except FileNotFoundError:
        raise SourceError(f"{location} disappeared while it was being prepared; run the same command again") from None
    if now != (num_bytes, stamp):
        raise SourceError(f"{location} changed while it was being prepared; run the same command again")


@contextmanager
def open_file(location: Location, num_bytes: int, limits: LimitSettings) -> Iterator[Readable]:
    """The file, open for reading.

    Raises:
        SourceError: the store fails for good, while it is opened or read.
    """
    if not location.store:
        with Path(location.name).open("rb") as file:
            yield file
        return
    remote = _StoreFile(location, num_bytes, limits)
    try:
        yield remote
    finally:
        remote.close()


def digest(location: Location, num_bytes: int, limits: LimitSettings) -> str:
    """`sha256:` and the hexadecimal digest of a file's content."""
    state = hashlib.sha256()
    with open_file(location, num_bytes, limits) as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return f"sha256:{state.hexdigest()}"


def _list_local(named: str) -> Listing:
    path = Path(named)
    if path.is_dir():
        return Listing(named, [found_here(path, file) for file in files_below(path)], is_folder=True)
    if path.is_file():
        return Listing(named, [found_here(path.parent, path)], is_folder=False)
    folder = Path(*_before_magic(path.parts))
    names = sorted(set(glob.glob(named, recursive=True))) if glob.has_magic(named) else []  # noqa: PTH207 - absolute patterns
    files = [found_here(folder, Path(name)) for name in names if Path(name).is_file()]
    return Listing(str(folder) if files else named, files, is_folder=False)


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those in it, links followed; hidden ones are left out, as they are no text to train on.

    A link back to a folder that it is in leads to nothing new, and is not followed. Links that lead nowhere are named in a warning.

    Raises:
        SourceError: a folder, or what a link leads to, may not be read, so that nobody knows what is missing.
    """
    broken: list[str] = []
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while waiting:
        here, above = waiting.pop()
        folders = []
        try:
            status = here.stat()
            identity = (status.st_dev, status.st_ino)
            names = [] if identity in above else sorted(os.listdir(here))  # noqa: PTH208 - names are wanted
        except OSError as error:
            raise _unreadable(here, error) from None
        for path in (here / name for name in names if not is_hidden(name)):
            try:
                mode = path.stat().st_mode
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise _unreadable(path, error) from None
                broken.append(printable(path.relative_to(folder).as_posix()))
                continue
            if stat.S_ISDIR(mode):
                folders.append((path, above | {identity}))
            elif stat.S_ISREG(mode):
                yield path
        waiting += reversed(folders)
    if broken:
        shown = ", ".join(broken[:_SHOWN]) + (", …" if len(broken) > _SHOWN else "")
        logger.warning("source %s: %d links lead nowhere: %s", printable(str(folder)), len(broken), shown)


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{printable(str(path))}: cannot be read ({error.strerror}); give access to it, or name other sources")


def found_here(folder: Path, file: Path) -> Found:
    """A file of this machine, and its path relative to a folder."""
    status = file.stat()
    path = printable(file.relative_to(folder).as_posix())
    stamp, status_stamp = str(status.st_mtime_ns), str(status.st_ctime_ns)
    return Found(Location(str(file.absolute())), path, status.st_size, stamp, status_stamp=status_stamp)


def _before_magic(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def _list_store(named: str, limits: LimitSettings) -> Listing:
    protocol = named.partition("://")[0]
    shown = Location(named, named)
    system = _attempts(lambda: _store(named), shown, limits)
    name = str(system._strip_protocol(named)).rstrip("/")
    # In a web address a question mark begins the query, and is no pattern.
    magic = any(sign in name for sign in ("*[" if protocol in ("http", "https") else "*?["))

    def find() -> dict[str, Mapping[str, Any]]:
        if magic:
            return dict(system.glob(name, detail=True))
        info = system.info(name)
        return {name: info} if info["type"] == "file" else dict(system.find(name, detail=True))

    try:
        infos = _attempts(find, shown, limits)
    except FileNotFoundError:
        return Listing(str(shown), [], is_folder=False)
    root = "/".join(_before_magic(name.split("/"))) if magic else name
    root = _without_query(root, protocol).rpartition("/")[0] if list(infos) == [name] else root
    files = [
        _found_in_store(system, Location(found, named), limits, info, root)
        for found, info in infos.items()
        if info["type"] == "file"
    ]
    return Listing(str(Location(root if magic else name, named)), files, is_folder=not magic and list(infos) != [name])


def _found_in_store(
    system: Any, location: Location, limits: LimitSettings, listed: Mapping[str, Any] | None = None, root: str = ""
) -> Found:
    """A file of a store; where the listing has no checksum of it, the file itself is asked about."""
    info = listed or {}
    if not (checksum := _checksum(info)):
        info = _attempts(lambda: _fresh_info(system, location.name), location, limits)
        checksum = _checksum(info)
    if info.get("size") is None:
        raise SourceError(f"{location}: the server does not tell its size; download it and name the local file")
    path = printable(_without_query(location.name.removeprefix(root).lstrip("/"), location.store))
    return Found(location, path, int(info["size"]), checksum or "unknown", checksum)


def _fresh_info(system: Any, name: str) -> Mapping[str, Any]:
    system.invalidate_cache()
    info: Mapping[str, Any] = system.info(name)
    return info


def _checksum(info: Mapping[str, Any]) -> str:
    """The best that a store knows of a file's content, in the words of S3, Google, Hugging Face and web servers."""
    large = info.get("lfs")
    if isinstance(large, Mapping) and large.get("sha256"):
        return f"sha256:{large['sha256']}"
    keys = ("md5Hash", "Content-MD5", "crc32c", "ETag", "etag", "blob_id")
    for key, algorithm in zip(keys, ("md5", "md5", "crc32c", "etag", "etag", "git"), strict=True):
        if value := info.get(key):
            return f"{algorithm}:{str(value).strip(chr(34))}"
    for key in ("LastModified", "Last-Modified", "updated", "mtime", "created"):
        if value := info.get(key):
            return f"modified:{value.timestamp() if hasattr(value, 'timestamp') else value}"
    return ""


def _store(url: str) -> Any:
    """The store that a URL opens.

    Raises:
        SourceError: there is no such store, or its package is missing.
    """
    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError:
        package = _PACKAGES.get(protocol)
        remedy = f"python -m pip install {package}" if package else "see the list of known implementations of fsspec"
        raise SourceError(f"{Location(url, url)}: {protocol}:// needs a package that is not installed: {remedy}") from None
    except ValueError:
        raise SourceError(f"{Location(url, url)}: {protocol}:// is no store that fsspec knows; check the address") from None


class _StoreFile:
    """A file of a store that survives interruptions: after one it is opened again at the same byte."""

    def __init__(self, location: Location, num_bytes: int, limits: LimitSettings) -> None:
        self._location = location
        self._bytes = num_bytes
        self._limits = limits
        self._position = 0
        self._only_forwards = False
        self._file: Any = None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int) -> None:
        if offset != self._position:
            self._position = offset
            self.close()  # a store's file that is opened again begins at its position

    def read(self, size: int) -> bytes:
        data = _attempts(lambda: self._read(min(size, max(self._bytes - self._position, 0))), self._location, self._limits)
        self._position += len(data)
        return data

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _read(self, size: int) -> bytes:
        if not size:
            return b""
        try:
            if self._file is None:
                self._file = self._open()
            data: bytes = self._file.read(size)
        except Exception as error:
            self.close()
            if isinstance(error, ValueError) and not self._only_forwards:
                self._only_forwards = True  # a web server that does not send parts of a file says so now
                return self._read(size)
            raise
        if not data:
            self.close()
            raise OSError(f"the store gave nothing at byte {self._position} of {self._bytes}")
        return data

    def _open(self) -> Any:
        block_bytes = 0 if self._only_forwards else _STORE_BLOCK_BYTES
        file = _store(self._location.store).open(self._location.name, "rb", block_size=block_bytes)
        if not self._only_forwards:
            file.seek(self._position)
            return file
        left = self._position
        while left:
            left -= len(file.read(min(1 << 20, left)) or self._cut_short())
        return file

    def _cut_short(self) -> bytes:
        raise OSError(f"the store ended before byte {self._position}")


def _attempts(action: Callable[[], Result], location: Location, limits: LimitSettings) -> Result:
    """What `action` returns, in so many attempts with growing waits between them.

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: it failed every time, or will always fail.
    """
    for attempt in range(limits.retries + 1):
        try:
            return action()
        except SourceError:
            raise
        except PermissionError:
            raise SourceError(f"{location}: access is refused; check the credentials in the environment") from None
        except Exception as error:  # each store has errors of its own
            if isinstance(error, FileNotFoundError) and _is_gone(error):
                raise FileNotFoundError(str(location)) from None
            kind = _kind_of(error)
            if attempt == limits.retries:
                tries = f"{attempt + 1} times" if attempt else "once"
                raise SourceError(f"{location}: reading failed {tries}, at last with {kind}; run the same command again") from None
        wait_s = min(limits.retry_wait_s * 2**attempt, _MAX_WAIT_S)
        logger.warning("%s: %s; trying again in %.1f s (%d of %d)", location, kind, wait_s, attempt + 1, limits.retries)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _is_gone(error: FileNotFoundError) -> bool:
    """Web stores say "not found" of every failure; what is behind it tells."""
    cause = error.__cause__
    return cause is None or getattr(cause, "status", None) in _GONE


def _kind_of(error: BaseException) -> str:
    """A store's error without its text."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", None) or getattr(cause, "errno", None)
    return f"{type(cause).__name__}{f' {status}' if isinstance(status, int) else ''}"


def _bare(name: str, protocol: str) -> str:
    """An address without user, password, query and fragment."""
    rest = _without_query(name.partition("://")[2] if "://" in name else name, protocol)
    authority, slash, path = rest.lstrip("/").partition("/")
    return f"{protocol}://{authority.rpartition('@')[2]}{slash}{path}"


def _without_query(name: str, store: str) -> str:
    """What follows a question mark can be a signature, and names no file."""
    name = name.partition("?")[0]
    return name.partition("#")[0] if store.startswith("http") else name
