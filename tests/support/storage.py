"""File layers that fail: a disk in memory that can lose its power, calls that stop or fail, and deliberately wrong layers.

They replace `trainer.checkpoint.filesystem.Storage`. A layer wraps another one. `Sloppy` makes the calls of the store incorrectly,
`Intercepted` runs a hook before each call that reaches the disk, and `SimulatedDisk` is the disk. The sloppy layers are the broken
variants on which each claim must fail.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint.filesystem import Storage

CHANGES = frozenset({"create", "write", "sync", "rename", "unlink", "make_directory", "remove_directory"})
"""Calls that change the content of the disk."""

Hook = Callable[[str, Path], None]


class Crash(BaseException):
    """The process has ended. No later operation happens."""


class CrashAt:
    """A hook that ends the process before its `number`-th change, counted from 0. No later change happens."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.operations: list[tuple[str, Path]] = []

    def __call__(self, operation: str, path: Path) -> None:
        if operation not in CHANGES:
            return
        if self.number is not None and len(self.operations) >= self.number:
            raise Crash
        self.operations.append((operation, path))


class FailAt:
    """A hook that lets the `number`-th call of the given kinds fail, and all later ones if `persistent`."""

    def __init__(self, number: int, code: int, kinds: frozenset[str], *, persistent: bool) -> None:
        self.number, self.code, self.kinds, self.persistent = number, code, kinds, persistent
        self.seen = 0
        self.failed: tuple[str, Path] | None = None

    def __call__(self, operation: str, path: Path) -> None:
        if operation not in self.kinds:
            return
        here, self.seen = self.seen, self.seen + 1
        if here == self.number or (self.persistent and here > self.number):
            self.failed = self.failed or (operation, path)
            raise OSError(self.code, os.strerror(self.code), str(path))


class Delegating(Storage):
    """A layer over another one. `_do` runs before each call except `size`, and after `close`."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self._paths: dict[int, Path] = {}
        self._reading: set[int] = set()

    def _do(self, operation: str, path: Path) -> None:
        """Run before each call. For a call with a descriptor, `path` is the path of its file."""

    def names(self, directory: Path) -> list[str]:
        self._do("names", directory)
        return self.inner.names(directory)

    def is_directory(self, path: Path) -> bool:
        self._do("is_directory", path)
        return self.inner.is_directory(path)

    def open(self, path: Path) -> int:
        self._do("open", path)
        descriptor = self._opened(self.inner.open(path), path)
        self._reading.add(descriptor)
        return descriptor

    def open_directory(self, path: Path) -> int:
        self._do("open_directory", path)
        return self._opened(self.inner.open_directory(path), path)

    def size(self, descriptor: int) -> int:
        return self.inner.size(descriptor)

    def read_into(self, descriptor: int, buffer: memoryview) -> int:
        self._do("read", self._paths[descriptor])
        return self.inner.read_into(descriptor, buffer)

    def create(self, path: Path) -> int:
        self._do("create", path)
        return self._opened(self.inner.create(path), path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._do("write", self._paths[descriptor])
        return self.inner.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        try:
            self._do("sync", self._paths[descriptor])
        except OSError:
            if isinstance(self.inner, SimulatedDisk):
                self.inner.lose_pages(descriptor)
            raise
        self.inner.sync(descriptor)

    def close(self, descriptor: int) -> None:
        path = self._paths.pop(descriptor)
        self.inner.close(descriptor)  # a failing close frees the descriptor too
        self._do("close after reading" if descriptor in self._reading else "close", path)
        self._reading.discard(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", target)
        self.inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        self._do("unlink", path)
        self.inner.unlink(path)

    def make_directory(self, path: Path) -> None:
        self._do("make_directory", path)
        self.inner.make_directory(path)

    def remove_directory(self, path: Path) -> None:
        self._do("remove_directory", path)
        self.inner.remove_directory(path)

    def _opened(self, descriptor: int, path: Path) -> int:
        self._paths[descriptor] = path
        return descriptor


class Intercepted(Delegating):
    """Runs a hook before each call."""

    def __init__(self, inner: Storage, hook: Hook) -> None:
        super().__init__(inner)
        self._hook = hook

    def _do(self, operation: str, path: Path) -> None:
        self._hook(operation, path)


class Sloppy(Delegating):
    """A layer that leaves out steps that make a save safe. `flaws` names them:

    no file sync        files are not forced to the device
    no directory sync   directories are not forced to the device
    no rename           content is copied to the final name piece by piece, then the temporary file is removed
    retries sync        a failed fsync is repeated, and succeeds without the lost pages
    ignores errors      a failed write counts as done
    """

    def __init__(self, inner: Storage, flaws: frozenset[str] | set[str]) -> None:
        super().__init__(inner)
        self.flaws = flaws
        self._directories: set[int] = set()

    def open_directory(self, path: Path) -> int:
        descriptor = super().open_directory(path)
        self._directories.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._directories.discard(descriptor)
        super().close(descriptor)

    def write(self, descriptor: int, data: memoryview) -> int:
        try:
            return super().write(descriptor, data)
        except OSError:
            if "ignores errors" not in self.flaws:
                raise
            return len(data)

    def sync(self, descriptor: int) -> None:
        if ("no directory sync" if descriptor in self._directories else "no file sync") in self.flaws:
            return
        try:
            super().sync(descriptor)
        except OSError:
            if "retries sync" not in self.flaws:
                raise
            super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        if "no rename" not in self.flaws:
            super().rename(source, target)
            return
        if self.inner.is_directory(source):
            self.inner.make_directory(target)
            for name in self.inner.names(source):
                self.rename(source / name, target / name)
            self.inner.remove_directory(source)
            return
        if target.name in self.inner.names(target.parent):
            self.inner.unlink(target)
        self._copy(source, target)
        self.inner.unlink(source)

    def _copy(self, source: Path, target: Path) -> None:
        reading = self.inner.open(source)
        content = bytearray(self.inner.size(reading))
        filled = 0
        while filled < len(content):
            filled += self.inner.read_into(reading, memoryview(content)[filled:])
        self.inner.close(reading)
        writing = self.inner.create(target)
        half = len(content) // 2
        for part in (memoryview(content)[:half], memoryview(content)[half:]):
            self.inner.write(writing, part)
        self.inner.sync(writing)
        self.inner.close(writing)


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last sync: offset and bytes."""


@dataclass
class _Folder:
    entries: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """Entries that change together: directory, name, and the node that the name then refers to, or None."""

    effects: tuple[tuple[int, str, int | None], ...]


class SimulatedDisk(Storage):
    """A file system in memory that models the losses of a power failure.

    The content of a file as of its last fsync and the entries of a directory as of its last fsync are guaranteed. Of later
    operations, any subset may have reached the device: a write completely, in part, as zeros or not at all; a change of a directory
    done or not. A rename within one directory is done completely or not at all. ext4 and XFS promise more than this.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _File | _Folder] = {0: _Folder()}
        self._journal: list[_Change] = []
        self._descriptors: dict[int, list[int]] = {}
        self._next = 1

    def copy(self) -> SimulatedDisk:
        """Return a copy of this disk without open descriptors."""
        other = SimulatedDisk()
        for number, node in self._nodes.items():
            if isinstance(node, _File):
                other._nodes[number] = _File(bytearray(node.content), node.durable, list(node.pending))
            else:
                other._nodes[number] = _Folder(dict(node.entries), dict(node.durable))
        other._journal, other._next = list(self._journal), self._next
        return other

    def after_power_loss(self, draw: random.Random | None) -> SimulatedDisk:
        """Return the disk as found after a power failure now. With None, everything that is not guaranteed is lost."""
        chance = draw.choice((0.0, 0.1, 0.5, 0.9, 1.0)) if draw else 0.0
        found = self.copy()
        for node in found._nodes.values():
            if isinstance(node, _File):
                node.content = _survived(node, draw, chance)
                node.durable, node.pending = bytes(node.content), []
            else:
                node.entries = dict(node.durable)
        for change in self._journal:
            if draw and draw.random() < chance:
                found._apply(change, durable=False)
        for node in found._nodes.values():
            if isinstance(node, _Folder):
                node.durable = dict(node.entries)
        found._journal = []
        return found

    def lose_pages(self, descriptor: int) -> None:
        """Do what a failed fsync does: the pages are no longer dirty, are still read from memory, and never reach the device."""
        node = self._nodes[self._descriptors[descriptor][0]]
        if isinstance(node, _File):
            node.pending = []

    def files(self, below: Path) -> list[Path]:
        """Return all files below a directory."""
        found = []
        for name in self.names(below):
            found += self.files(below / name) if self.is_directory(below / name) else [below / name]
        return found

    def content(self, path: Path) -> bytearray:
        """Return the bytes of a file. Changing them damages the file without a trace."""
        return self._file(self._node_at(path)).content

    def names(self, directory: Path) -> list[str]:
        return sorted(self._folder(self._node_at(directory)).entries)

    def is_directory(self, path: Path) -> bool:
        try:
            return isinstance(self._nodes[self._node_at(path)], _Folder)
        except OSError:
            return False

    def open(self, path: Path) -> int:
        return self._open(self._node_at(path))

    def open_directory(self, path: Path) -> int:
        node = self._node_at(path)
        self._folder(node)
        return self._open(node)

    def size(self, descriptor: int) -> int:
        return len(self._file(self._descriptors[descriptor][0]).content)

    def read_into(self, descriptor: int, buffer: memoryview) -> int:
        node, offset = self._descriptors[descriptor]
        piece = self._file(node).content[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self._descriptors[descriptor][1] += len(piece)
        return len(piece)

    def create(self, path: Path) -> int:
        node = self._add(path, _File())
        return self._open(node)

    def write(self, descriptor: int, data: memoryview) -> int:
        node, offset = self._descriptors[descriptor]
        file = self._file(node)
        taken = bytes(data[: max(64, len(data) // 2)])  # a short write, so that a file has several writes
        file.content[offset : offset + len(taken)] = taken
        file.pending.append((offset, taken))
        self._descriptors[descriptor][1] += len(taken)
        return len(taken)

    def sync(self, descriptor: int) -> None:
        number = self._descriptors[descriptor][0]
        node = self._nodes[number]
        if isinstance(node, _File):
            node.durable, node.pending = _with_writes(node.durable, node.pending), []
            return
        waiting = []
        for change in self._journal:
            if any(folder == number for folder, _, _ in change.effects):
                self._apply(change, durable=True)
            else:
                waiting.append(change)
        self._journal = waiting

    def close(self, descriptor: int) -> None:
        del self._descriptors[descriptor]

    def rename(self, source: Path, target: Path) -> None:
        node = self._node_at(source)
        into, out_of = self._node_at(target.parent), self._node_at(source.parent)
        there = self._folder(into).entries.get(target.name)
        if there is not None:
            replaced = self._nodes[there]
            if isinstance(replaced, _Folder) and replaced.entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
        self._change((into, target.name, node), (out_of, source.name, None))

    def unlink(self, path: Path) -> None:
        self._file(self._node_at(path))
        self._change((self._node_at(path.parent), path.name, None))

    def make_directory(self, path: Path) -> None:
        self._add(path, _Folder())

    def remove_directory(self, path: Path) -> None:
        if self._folder(self._node_at(path)).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._change((self._node_at(path.parent), path.name, None))

    def _node_at(self, path: Path) -> int:
        node = 0
        for part in path.parts[1:]:
            entries = self._folder(node).entries
            if part not in entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = entries[part]
        return node

    def _file(self, node: int) -> _File:
        found = self._nodes[node]
        if not isinstance(found, _File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return found

    def _folder(self, node: int) -> _Folder:
        found = self._nodes[node]
        if not isinstance(found, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return found

    def _open(self, node: int) -> int:
        descriptor, self._next = self._next, self._next + 1
        self._descriptors[descriptor] = [node, 0]
        return descriptor

    def _add(self, path: Path, new: _File | _Folder) -> int:
        parent = self._node_at(path.parent)
        if path.name in self._folder(parent).entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        number, self._next = self._next, self._next + 1
        self._nodes[number] = new
        self._change((parent, path.name, number))
        return number

    def _change(self, *effects: tuple[int, str, int | None]) -> None:
        change = _Change(effects)
        self._apply(change, durable=False)
        self._journal.append(change)

    def _apply(self, change: _Change, *, durable: bool) -> None:
        for number, name, node in change.effects:
            folder = self._folder(number)
            entries = folder.durable if durable else folder.entries
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


def _with_writes(content: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    result = bytearray(content)
    for offset, data in writes:
        result.extend(bytes(max(0, offset - len(result))))
        result[offset : offset + len(data)] = data
    return bytes(result)


def _survived(file: _File, draw: random.Random | None, chance: float) -> bytearray:
    kept = []
    for offset, data in file.pending if draw else ():
        assert draw is not None
        if draw.random() < chance:
            kept.append((offset, data))
        elif draw.random() < 0.3:
            kept.append((offset, bytes(len(data))))
        elif draw.random() < 0.3:
            kept.append((offset, data[: draw.randrange(len(data) + 1)]))
    return bytearray(_with_writes(file.durable, kept))
