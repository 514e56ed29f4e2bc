"""The files of this machine that a source names, and what is known about each file of a source.

A source may come from a stranger: links are followed only inside the named folder, unless `limits.outside_links` allows others.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from common.errors import SourceError
from common.redaction import redacted_url, url_chain
from common.storage_errors import explain_os_error
from common.text import some_of
from data_pipeline.sources.formats import is_hidden, printable

logger = logging.getLogger(__name__)

ARCHIVE_STORES = ("zip", "tar", "libarchive")
_SHOWN = 8  # maximum number of names in a message
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # errors of a link without a target
_MAX_LINKED_FOLDERS = 10_000


class UnreadableSourceError(SourceError):
    """A source cannot be read now. The next start of the same preparation may succeed, so its work is kept."""


@dataclass(frozen=True, repr=False)
class Location:
    """Its text form has no credentials and no query, so any message may contain it."""

    name: str  # of a local file, or in its store
    store: str = ""  # URL from the user, which opens the store and may contain secrets; empty for a local file

    def __str__(self) -> str:
        return printable(_address(self.name, self.store)) if self.store else self.name

    __repr__ = __str__


@dataclass(frozen=True)
class Found:
    location: Location
    path: str  # relative to the root of the listing, with forward slashes
    bytes: int
    stamp: str  # changes with the content: time of the last change in ns, or checksum of a store
    checksum: str = ""  # `algorithm:value` from the store; empty if the content must be read to compute it
    status_stamp: str = ""  # time in ns of the last change, which programs cannot set; empty for a store


@dataclass(frozen=True)
class Unfollowed:
    """Links inside a source that were not followed, all for the same reason."""

    paths: Sequence[str]
    found: str  # clause of a message: number of links, reason, and some names
    remedy: str


@dataclass(frozen=True)
class Listing:
    root: str  # folder that the paths are relative to, or the file itself, without secrets
    files: Sequence[Found]
    is_folder: bool
    unfollowed: Sequence[Unfollowed] = ()


def is_url(named: str) -> bool:
    return "://" in named and not named.startswith("file://")


def _address(name: str, store: str) -> str:
    if name == store:
        return redacted_url(store)
    outermost, *inner = url_chain(store)
    if "://" in name:  # a web server, possibly behind caches, whose part of the URL has no `://`
        caches = [part for part in (outermost, *inner) if "://" not in part]
        return "::".join((*caches, redacted_url(name)))
    address = redacted_url(f"{outermost.partition('://')[0]}://{name.lstrip('/')}")
    return "::".join((address, *map(redacted_url, inner))) if outermost.partition("://")[0] in ARCHIVE_STORES else address


def list_local(named: str, outside_links: bool) -> Listing:
    path = Path(named)
    if path.is_dir():
        links = _Links(path, outside_links)
        files = [found_here(path, file) for file in files_below(path, links)]
        return Listing(named, files, is_folder=True, unfollowed=links.unfollowed())
    if path.is_file():
        return Listing(named, [found_here(path.parent, path)], is_folder=False)
    folder = Path(*takewhile(is_plain, path.parts))
    links = _Links(folder, outside_links)
    matches = set(_matches(folder, path.parts[len(folder.parts) :], links)) if glob.has_magic(named) else set()
    files = [found_here(folder, match) for match in sorted(matches, key=str) if match.is_file()]
    links.warn()
    return Listing(str(folder) if files else named, files, is_folder=False, unfollowed=links.unfollowed())


@dataclass
class _Links:
    root: Path
    outside: bool
    left_out: dict[str, None] = field(default_factory=dict)
    broken: dict[str, None] = field(default_factory=dict)
    num_folders: int = 0

    def __post_init__(self) -> None:
        self._real_root = Path(os.path.realpath(self.root))

    def leads_out(self, path: Path) -> bool:
        """Whether a path is a link that must not be followed. Such a link is recorded."""
        if self.outside or not path.is_symlink() or Path(os.path.realpath(path)).is_relative_to(self._real_root):
            return False
        try:
            path.stat()
        except OSError as error:
            if error.errno in _NOWHERE:  # `limits.outside_links` would not help
                self.leads_nowhere(path)
                return True
        self.left_out[self._shown(path)] = None
        return True

    def leads_nowhere(self, path: Path) -> None:
        self.broken[self._shown(path)] = None

    def warn(self) -> None:
        for links in self.unfollowed():
            logger.warning("source %s: %s; to follow them, %s", printable(str(self.root)), links.found, links.remedy)

    def unfollowed(self) -> list[Unfollowed]:
        outside = "set limits.outside_links to true (PREP_LIMITS__OUTSIDE_LINKS=true)"
        nowhere = "copy the targets of the links (in a container: mount them at the same path)"
        found = []
        for links, fault, remedy in (
            ([*self.broken], "without a target", nowhere),
            (sorted(self.left_out), "with a target outside of the folder", outside),
        ):
            if links:
                clause = f"{len(links)} link{'s' if len(links) > 1 else ''} {fault}: {some_of(links, _SHOWN)}"
                found.append(Unfollowed(links, clause, remedy))
        return found

    def _shown(self, path: Path) -> str:
        return printable(path.relative_to(self.root).as_posix())


def _matches(folder: Path, pattern: Sequence[str], links: _Links) -> Iterator[Path]:
    if not pattern:
        yield folder
        return
    part, rest = pattern[0], pattern[1:]
    if part == "**":
        for below, _ in _walk(folder, links, is_strict=False):
            yield from _matches(below, rest or ("*",), links)
    elif not glob.has_magic(part):
        if not links.leads_out(folder / part):
            yield from _matches(folder / part, rest, links)
    else:
        with contextlib.suppress(OSError):
            for name in fnmatch.filter(os.listdir(folder), part):  # noqa: PTH208 - names are wanted
                if (part.startswith(".") or not name.startswith(".")) and not links.leads_out(folder / name):
                    yield from _matches(folder / name, rest, links)


def files_below(folder: Path, links: _Links | None = None) -> Iterator[Path]:
    """Yield no hidden files, and follow no link back to a folder above. `links` decides about other links; a warning names them."""
    links = links or _Links(folder, outside=True)
    for _, files in _walk(folder, links, is_strict=True):
        yield from files
    links.warn()


def _walk(root: Path, links: _Links, *, is_strict: bool) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each folder with its files, except hidden names. If not strict, nothing is said about names that cannot be read."""
    waiting: list[tuple[Path, frozenset[tuple[int, int]], int]] = [(root, frozenset(), 0)]
    while waiting:
        # The folders on the path to this one by device and inode number, and the number of links on the path below the root.
        folder, above, num_links = waiting.pop()
        files, folders = [], []
        paths: list[Path] = []
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                continue
            names = sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted
            paths = [path for name in names if not is_hidden(name) and not links.leads_out(path := folder / name)]
        except OSError as error:
            if is_strict:
                raise unreadable(folder, error) from None
        for path in paths:
            try:
                mode = path.stat().st_mode
            except OSError as error:
                if is_strict and error.errno not in _NOWHERE:
                    raise unreadable(path, error) from None
                if is_strict:
                    links.leads_nowhere(path)
                continue
            if stat.S_ISDIR(mode):
                num_followed = num_links + path.is_symlink()
                links.num_folders += num_followed > 1  # a dozen folders that link to each other have 10^9 paths
                if links.num_folders > _MAX_LINKED_FOLDERS:
                    raise SourceError(
                        f"source {printable(str(links.root))}: its links lead to more than {_MAX_LINKED_FOLDERS} folders; "
                        "remove links that connect folders in both directions"
                    )
                folders.append((path, above | {identity}, num_followed))
            elif stat.S_ISREG(mode):
                files.append(path)
        yield folder, files
        waiting += reversed(folders)


def unreadable(path: Path, error: OSError) -> UnreadableSourceError:
    error.filename = error.filename or str(path)
    return UnreadableSourceError(printable(explain_os_error(error)))


def found_here(folder: Path, file: Path) -> Found:
    status = file.stat()
    path = printable(file.relative_to(folder).as_posix())
    stamp, status_stamp = str(status.st_mtime_ns), str(status.st_ctime_ns)
    return Found(Location(str(file.absolute())), path, status.st_size, stamp, status_stamp=status_stamp)


def is_plain(part: str) -> bool:
    return not glob.has_magic(part)
