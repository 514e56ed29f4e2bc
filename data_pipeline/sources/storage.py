"""List and read files of this machine and of any store that fsspec supports (`s3://`, `gs://`, `hf://`, `http://`, …).

A failed read from a store is retried from its byte. The error text of a store is never shown, as it can contain secrets.

A local file is identified by its content; one in a store by size and checksum (SHA-256, MD5, CRC32C or entity tag), or else by its
time, so it is not downloaded only to identify it.

A source may come from a stranger: redirects are followed only to the named host (`hosts`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from common.errors import SourceError
from common.files import UnusableFileError, digest_stream, open_input
from common.redaction import redacted_url, url_chain
from common.storage_errors import naming
from data_pipeline.config import LimitConfig
from data_pipeline.sources.formats import printable
from data_pipeline.sources.listing import (
    ARCHIVE_STORES,
    Found,
    Listing,
    Location,
    UnreadableSourceError,
    is_plain,
    is_url,
    list_local,
    unreadable,
)
from data_pipeline.sources.streams import Readable

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 30.0
_STORE_BLOCK_BYTES = 4 << 20  # of one request; the default of a store can be 50 MiB for each open file
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    **{"hf": "huggingface-hub", "smb": "smbprotocol", "webdav": "webdav4", "oss": "ossfs", "oci": "ocifs", "git": "pygit2"},
}
_HADOOP = re.compile("libjvm|libhdfs|CLASSPATH|JAVA_HOME|HADOOP_HOME")  # in errors of pyarrow if Hadoop's client cannot be loaded
_GONE = (404, 410)  # HTTP status codes
_WEB = ("http", "https")
_LOCAL = ("file", "local", "asynclocal")
_POINTERS = ("reference", "generic")  # stores whose files contain the addresses of other files

Result = TypeVar("Result")


def list_files(named: str, limits: LimitConfig) -> Listing:
    """List a file, or all files of a folder, or those that match a pattern. The list is empty if nothing has this name."""
    return _list_store(named, limits) if is_url(named) else list_local(named.removeprefix("file://"), limits.outside_links)


def check_unchanged(location: Location, num_bytes: int, stamp: str, limits: LimitConfig) -> None:
    """Raise SourceError if the file has changed, FileNotFoundError if it is gone."""
    if location.store:
        found = _found_in_store(_store(location.store, limits), location, limits)
        now = (found.bytes, found.stamp)
    else:
        status = Path(location.name).stat()
        now = (status.st_size, str(status.st_mtime_ns))
    if now != (num_bytes, stamp):
        raise SourceError(f"{location} changed while it was being prepared; run the same command again")


@contextlib.contextmanager
def open_file(location: Location, num_bytes: int, limits: LimitConfig) -> Iterator[Readable]:
    if location.store:
        with contextlib.closing(_StoreFile(location, num_bytes, limits)) as remote:
            yield remote
        return
    path = Path(location.name)
    try:
        file = open_input(path)
    except UnusableFileError as error:
        raise SourceError(f"{printable(str(error))}; it changed during the preparation: run the same command again") from None
    except PermissionError as error:
        raise unreadable(path, error) from None
    with file, naming(path):
        yield file


def digest(location: Location, num_bytes: int, limits: LimitConfig) -> str:
    with open_file(location, num_bytes, limits) as file:
        return digest_stream(file)


def _list_store(named: str, limits: LimitConfig) -> Listing:
    shown = Location(named, named)
    try:
        system = _attempts(lambda: _store(named, limits), shown, limits)
        name = str(system._strip_protocol(named)).rstrip("/")
        # In a web address a question mark begins the query, so it is not part of a pattern.
        magic = any(sign in name for sign in ("*[" if _is_web(name, named) else "*?["))

        def find() -> dict[str, Mapping[str, Any]]:
            if magic:
                return dict(system.glob(name, detail=True))
            info = system.info(name)
            return {name: info} if info["type"] == "file" else dict(system.find(name, detail=True))

        infos = _attempts(find, shown, limits)
    except FileNotFoundError:
        return Listing(str(shown), [], is_folder=False)
    root = "/".join(takewhile(is_plain, name.split("/"))) if magic else name
    root = _plain_name(root, named).rpartition("/")[0] if list(infos) == [name] else _plain_name(root, named)
    files = [
        _found_in_store(system, Location(found, named), limits, info, root)
        for found, info in infos.items()
        if info["type"] == "file"
    ]
    return Listing(str(Location(root if magic else name, named)), files, is_folder=not magic and list(infos) != [name])


def _found_in_store(
    system: Any, location: Location, limits: LimitConfig, listed: Mapping[str, Any] | None = None, root: str = ""
) -> Found:
    """Describe a file of a store. If the listing has no checksum, the file is queried. `root` has no secrets."""
    info = listed or {}
    if not (checksum := _checksum(info)):
        system.invalidate_cache()
        info = _attempts(lambda: system.info(location.name), location, limits)
        checksum = _checksum(info)
    if info.get("size") is None:
        raise SourceError(f"{location}: the server does not state its size; download it and name the local file")
    path = printable(_plain_name(location.name, location.store).removeprefix(root).lstrip("/"))
    return Found(location, path, int(info["size"]), checksum or "unknown", checksum)


def _checksum(info: Mapping[str, Any]) -> str:
    """Return the best checksum in the information of S3, Google, Hugging Face or a web server; empty if there is none."""
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


def _store(url: str, limits: LimitConfig) -> Any:
    protocols = _protocols(url)
    protocol = protocols[0]
    # Stores whose files name other addresses are refused, and URLs that lead to local files without the checks of links.
    if pointer := next((protocol for protocol in protocols if protocol in _POINTERS), None):
        raise SourceError(f"{Location(url, url)}: files in {pointer}:// name other addresses to read; name those addresses instead")
    if any(protocol in _LOCAL for protocol in protocols) and protocol not in ARCHIVE_STORES:
        raise SourceError(f"{Location(url, url)}: a local file must be named by its path alone; remove the protocols")
    options: dict[str, Any] = {}
    try:
        if web := [protocol for protocol in protocols if protocol in _WEB]:
            from data_pipeline.sources.hosts import GuardedClient  # noqa: PLC0415 - its package is optional

            options = {protocol: {"get_client": GuardedClient(limits.allowed_hosts)} for protocol in web}
        return fsspec.core.url_to_fs(url, **options)[0]
    except ImportError:
        raise _without_package(url) from None
    except (TypeError, AttributeError):
        raise SourceError(
            f"{Location(url, url)}: {protocol}:// needs settings that an address cannot hold; download the "
            "files and name their folder"
        ) from None
    except OSError as error:
        if protocol in ("hdfs", "arrow_hdfs") and _HADOOP.search(str(error)):
            raise SourceError(
                f"{Location(url, url)}: {protocol}:// needs Java and Hadoop's client library (libhdfs), which cannot be loaded; "
                "install both, and set JAVA_HOME, HADOOP_HOME and CLASSPATH (to the output of `hadoop classpath --glob`), "
                "or use webhdfs://"
            ) from None
        raise
    except ValueError:
        raise SourceError(f"{Location(url, url)}: {protocol}:// is not a store that fsspec knows; check the address") from None


def _without_package(url: str) -> UnreadableSourceError:
    protocol = _protocols(url)[0]
    package, known = _PACKAGES.get(protocol), known_implementations.get(protocol, {})
    remedy = f"python -m pip install {package}" if package else known.get("err", "see the list of known implementations of fsspec")
    return UnreadableSourceError(f"{Location(url, url)}: {protocol}:// needs a package that is not installed: {remedy}")


def _protocols(url: str) -> list[str]:
    return [part.partition("://")[0] if not part.startswith("/") else "file" for part in url_chain(url)]


class _StoreFile:
    """A file of a store. After a failed read it is opened again at the same byte."""

    def __init__(self, location: Location, num_bytes: int, limits: LimitConfig) -> None:
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
            self.close()  # the next read opens the file again at this position

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
                self._only_forwards = True  # the error of a web server that cannot send parts of a file
                return self._read(size)
            raise
        if not data:
            self.close()
            raise OSError(f"the store returned no data at byte {self._position} of {self._bytes}")
        return data

    def _open(self) -> Any:
        block_bytes = 0 if self._only_forwards else _STORE_BLOCK_BYTES
        file = _store(self._location.store, self._limits).open(self._location.name, "rb", block_size=block_bytes)
        if not self._only_forwards:
            file.seek(self._position)
            return file
        left = self._position
        while left:
            if not (data := file.read(min(1 << 20, left))):
                raise OSError(f"the store ended before byte {self._position}")
            left -= len(data)
        return file


def _attempts(action: Callable[[], Result], location: Location, limits: LimitConfig) -> Result:
    """A failure is retried `limits.retries` times with growing waits. FileNotFoundError: there is no such file."""
    for attempt in range(limits.retries + 1):
        try:
            return action()
        except SourceError:
            raise
        except ImportError:  # some stores import their package late
            raise _without_package(location.store) from None
        except PermissionError:
            raise UnreadableSourceError(f"{location}: access is denied; check the credentials in the environment") from None
        except Exception as error:  # each store has different error types
            seen, inner = [], error.__cause__ or error.__context__
            while inner is not None and inner not in seen:
                if isinstance(inner, SourceError):  # raised by a function of this project that the store has called
                    raise inner from None
                seen.append(inner)
                inner = inner.__cause__ or inner.__context__
            # A web store reports every failure as "not found". Its cause has the HTTP status.
            cause = error.__cause__
            if isinstance(error, FileNotFoundError) and (cause is None or getattr(cause, "status", None) in _GONE):
                raise FileNotFoundError(str(location)) from None
            kind = _kind_of(error)
            if attempt == limits.retries:
                tries = f"{attempt + 1} times" if attempt else "once"
                raise UnreadableSourceError(
                    f"{location}: reading failed {tries}, last with {kind}; check the address, then run the same command again"
                ) from None
        wait_s = min(limits.retry_wait_s * 2**attempt, _MAX_WAIT_S)
        logger.warning("%s: %s; retry in %.1f s (%d of %d)", location, kind, wait_s, attempt + 1, limits.retries)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _kind_of(error: BaseException) -> str:
    """Return the type and status of a store's error, without its text, which can hold secrets."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if not status and isinstance(number := getattr(cause, "errno", None), int):
        return f"{type(cause).__name__} {number} ({os.strerror(number)})"
    return f"{type(cause).__name__}{f' {status}' if isinstance(status, int) else ''}"


def _plain_name(name: str, store: str) -> str:
    """Return a store's name of a file without secrets. Text after a question mark can be a signature."""
    return redacted_url(name) if _is_web(name, store) else name.partition("?")[0]


def _is_web(name: str, store: str) -> bool:
    return name.startswith(("http://", "https://")) or _protocols(store)[0] in _WEB
