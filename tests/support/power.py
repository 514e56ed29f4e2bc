"""A disk that loses its power: the changes that a program makes in a folder, and the states in which a device may be afterwards.

`Recording` compares the real folder before and after each call of `os` that creates or removes a name or syncs to the device. A
change that is found before a call was made by other code, including C code, so no change is missed. A sync from C is missed, which
makes the model stricter. `Disk` replays the operations up to a moment and draws one of the states that may be found after a power
failure at that moment.
"""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.storage import Crash

FLAWS = ("no file sync", "no directory sync", "no sync above new folders")
"""Operations that a replay can leave out, as if the program had not made them."""
ROOT = 0
"""Number of the folder that is watched. The folder itself is on the device."""
_NAMING = ("rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "mkdir")
_CUTTING = ("truncate", "ftruncate")
_PAGE_BYTES = 4096
_SECTOR_BYTES = 512
_CLOCK_NS = 20_000_000  # after a write, another write within this time may leave the same modification time

Effect = tuple[int, str, int | None]
"""Number of a folder, a name in it, and the number of the node that now has this name. None: the name was removed."""


@dataclass(frozen=True)
class Write:
    """Bytes of a file were overwritten or appended."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Cut:
    """A file became shorter."""

    file: int
    num_bytes: int


@dataclass(frozen=True)
class Naming:
    """Entries of folders changed together."""

    effects: tuple[Effect, ...]


@dataclass(frozen=True)
class Sync:
    """The content of a file, or the entries of a folder, were forced to the device."""

    node: int


Operation = Write | Cut | Naming | Sync


class Recording:
    """The operations below a folder, in order.

    Args:
        root: the folder. Its current content counts as being on the device.
    """

    def __init__(self, root: Path) -> None:
        self.operations: list[Operation] = []
        self.folders = {ROOT}
        """Numbers of folders. All other numbers are files."""
        self.claims: list[tuple[int, Any]] = []
        """Acknowledged values, each with the number of operations before it."""
        self.calls: list[int] = []
        """Number of operations before each watched call."""
        self._watch = _Watch(root, self)
        self._watch.look(together=False)
        self.operations += [Sync(node) for node in self._watch.numbers]

    def claim(self, value: Any) -> None:
        """Record that the program acknowledges `value` now."""
        self.claims.append((len(self.operations), value))

    def claimed(self, moment: int, before: Any = None) -> Any:
        """Return the last claim within the first `moment` operations, or `before` if there is none."""
        return next((value for position, value in reversed(self.claims) if position <= moment), before)

    @contextmanager
    def watching(self, crash_at: int | None = None) -> Iterator[None]:
        """Record the operations of this process within the block.

        With `crash_at`, each call from that one on raises `Crash` and does nothing. Calls are counted from 0 in this block.
        """
        lock = threading.RLock()
        last = None if crash_at is None else len(self.calls) + crash_at

        def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                with lock:
                    if last is not None and len(self.calls) >= last:
                        raise Crash
                    self._watch.look(together=False)
                    self.calls.append(len(self.operations))
                    result = real(*arguments, **named)
                    if name in _NAMING:
                        self._watch.look(together=True)
                    elif name == "fsync" and (node := self._watch.number_of(os.fstat(arguments[0]))) is not None:
                        self.operations.append(Sync(node))
                return result

            return call

        replaced = {name: getattr(os, name) for name in (*_NAMING, *_CUTTING, "fsync")}
        for name, real in replaced.items():
            setattr(os, name, watched(name, real))
        try:
            yield
        finally:
            for name, real in replaced.items():
                setattr(os, name, real)
            self._watch.look(together=False)


class _Watch:
    """Finds the changes below a folder since the previous look."""

    def __init__(self, root: Path, recording: Recording) -> None:
        self._root = root
        self._device = root.stat().st_dev
        self._recording = recording
        self._numbers = {root.stat().st_ino: ROOT}
        self._next = ROOT + 1
        self._entries: dict[int, dict[str, int]] = {ROOT: {}}
        self._contents: dict[int, bytes] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    def number_of(self, status: os.stat_result) -> int | None:
        """Return the number of a watched file or folder, or None if it is not watched."""
        return self._numbers.get(status.st_ino) if status.st_dev == self._device else None

    @property
    def numbers(self) -> list[int]:
        """Numbers of all existing files and folders."""
        return [*self._entries, *{node for names in self._entries.values() for node in names.values()}]

    def look(self, *, together: bool) -> None:
        """Add the changes to the recording. With `together`, one call has made all changes of entries."""
        entries: dict[int, dict[str, int]] = {}
        numbers = {self._root.stat().st_ino: ROOT}
        self._look_into(os.fspath(self._root), ROOT, entries, numbers)
        self._numbers = numbers
        effects = [
            effect for folder in entries for effect in _changed_entries(folder, self._entries.get(folder, {}), entries[folder])
        ]
        self._entries = entries
        if together and effects:
            self._recording.operations.append(Naming(tuple(effects)))
        elif effects:
            self._recording.operations += [Naming((effect,)) for effect in effects]

    def _look_into(self, path: str, folder: int, entries: dict[int, dict[str, int]], numbers: dict[int, int]) -> None:
        found = entries[folder] = {}
        with os.scandir(path) as scan:
            for entry in scan:
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
                        continue
                    number = self._number(status, numbers)
                    if stat.S_ISDIR(status.st_mode):
                        self._recording.folders.add(number)
                        self._look_into(entry.path, number, entries, numbers)
                    else:
                        self._look_at(entry.path, number, status)
                except FileNotFoundError:  # another thread or process has removed it
                    continue
                found[entry.name] = number

    def _number(self, status: os.stat_result, numbers: dict[int, int]) -> int:
        number = self._numbers.get(status.st_ino, self._next)
        self._next += number == self._next and status.st_ino not in numbers
        return numbers.setdefault(status.st_ino, number)

    def _look_at(self, path: str, number: int, status: os.stat_result) -> None:
        state = (status.st_size, status.st_mtime_ns)
        if self._seen.get(number) == state:
            return
        with open(path, "rb") as file:  # noqa: PTH123 - called thousands of times
            content = file.read()
        self._recording.operations += _changed_content(number, self._contents.get(number, b""), content)
        self._contents[number] = content
        settled = status.st_mtime_ns + _CLOCK_NS < time.time_ns() and len(content) == status.st_size
        self._seen[number] = state if settled else (-1, 0)


def _changed_entries(folder: int, before: dict[str, int], now: dict[str, int]) -> Iterator[Effect]:
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            yield folder, name, now.get(name)


def _changed_content(file: int, before: bytes, now: bytes) -> Iterator[Operation]:
    """Yield the operations from the old content to the new one. No write crosses a page, because pages are stored one by one."""
    if len(now) < len(before):
        yield Cut(file, len(now))
    place = len(before) if now.startswith(before) else 0
    while place < len(now):
        end = min(len(now), (place // _PAGE_BYTES + 1) * _PAGE_BYTES)
        if now[place:end] != before[place:end]:
            yield Write(file, place, now[place:end])
        place = end


@dataclass
class _File:
    durable: bytes = b""
    pending: list[Write | Cut] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """Entries and contents that are found after a power failure."""

    entries: dict[int, dict[str, int]]
    contents: dict[int, bytes]


class Disk:
    """The content that is certainly on a device, and the content that may be, after the operations that were applied.

    The content of a file as of its last sync and the entries of a folder as of its last sync are certain. Of all later operations,
    any part may have reached the device in any order: a page of a file completely, torn, as zeros or not at all; a change of
    entries done or not. A rename is done completely or not at all. One exception: a file that moves to another folder may be found
    in both.

    Args:
        recording: the operations.
        flaws: some of `FLAWS`.
    """

    def __init__(self, recording: Recording, flaws: frozenset[str] = frozenset()) -> None:
        self._recording = recording
        self._flaws = flaws
        self._moment = 0
        self._files: dict[int, _File] = {}
        self._entries: dict[int, dict[str, int]] = {ROOT: {}}
        self._waiting: list[Naming] = []

    def at(self, moment: int) -> Disk:
        """Return this disk after the first `moment` operations. `moment` must not decrease between calls."""
        for operation in self._recording.operations[self._moment : moment]:
            self._apply(operation)
        self._moment = moment
        return self

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Write() | Cut():
                self._files.setdefault(operation.file, _File()).pending.append(operation)
            case Naming():
                self._waiting.append(operation)
            case Sync(node) if node in self._recording.folders:
                if "no directory sync" not in self._flaws:
                    self._sync_folder(node)
            case Sync(node):
                if "no file sync" not in self._flaws:
                    file = self._files.setdefault(node, _File())
                    file.durable, file.pending = _with(file.durable, file.pending), []

    def _sync_folder(self, folder: int) -> None:
        """Make the entries of this folder certain, and the earlier changes of the same names in other folders."""
        certain: list[Naming] = []
        names: set[tuple[int, str]] = set()
        for change in reversed(self._waiting):
            concerned = any(where == folder or (where, name) in names for where, name, _ in change.effects)
            if concerned and not self._is_left_out(change):
                certain.append(change)
                names |= {(where, name) for where, name, _ in change.effects}
        for change in reversed(certain):
            _name(change.effects, self._entries, self._recording.folders)
        self._waiting = [change for change in self._waiting if not any(change is one for one in certain)]

    def _is_left_out(self, change: Naming) -> bool:
        is_new_folder = len(change.effects) == 1 and change.effects[0][2] in self._recording.folders
        return is_new_folder and "no sync above new folders" in self._flaws

    def after_power_loss(self, draw: random.Random) -> State:
        """Return a random state that may be found if the power fails now."""
        chances = (0.0, 0.1, 0.5, 0.9, 1.0)
        names_chance, contents_chance = draw.choice(chances), draw.choice(chances)
        entries = {folder: dict(names) for folder, names in self._entries.items()}
        in_order = draw.random() < 1 / 3
        kept = self._waiting[: draw.randint(0, len(self._waiting))] if in_order else self._waiting
        for change in kept:
            if in_order or draw.random() < names_chance:
                _name(_partly(change, self._recording.folders, draw), entries, self._recording.folders)
        contents = {number: _survived(file, draw, contents_chance) for number, file in self._files.items()}
        return State(entries, contents)

    def without_power_loss(self) -> State:
        """Return the state that programs see now."""
        entries = {folder: dict(names) for folder, names in self._entries.items()}
        for change in self._waiting:
            _name(change.effects, entries, self._recording.folders)
        return State(entries, {number: _with(file.durable, file.pending) for number, file in self._files.items()})


def _partly(change: Naming, folders: set[int], draw: random.Random) -> tuple[Effect, ...]:
    """Return the effects of a change. If a file moves to another folder, its old name may be kept."""
    is_of_file = not any(node in folders for _, _, node in change.effects)
    if is_of_file and len({folder for folder, _, _ in change.effects}) > 1 and draw.random() < 0.25:
        return tuple(effect for effect in change.effects if effect[2] is not None)
    return change.effects


def _name(effects: tuple[Effect, ...], entries: dict[int, dict[str, int]], folders: set[int]) -> None:
    for folder, name, node in effects:
        if node is None:
            entries.setdefault(folder, {}).pop(name, None)
    for folder, name, node in effects:
        if node is None:
            continue
        if node in folders:  # a folder has only one name
            for names in entries.values():
                for other in [other for other, there in names.items() if there == node]:
                    del names[other]
        entries.setdefault(folder, {})[name] = node


def _with(content: bytes, changes: list[Write | Cut]) -> bytes:
    result = bytearray(content)
    for change in changes:
        if isinstance(change, Cut):
            del result[change.num_bytes :]
        else:
            result.extend(bytes(max(0, change.offset - len(result))))
            result[change.offset : change.offset + len(change.data)] = change.data
    return bytes(result)


def _survived(file: _File, draw: random.Random, chance: float) -> bytes:
    kept: list[Write | Cut] = []
    for change in file.pending:
        if draw.random() < chance:
            kept.append(change)
        elif isinstance(change, Write) and draw.random() < 0.5:
            sectors = draw.randrange(len(change.data) + 1) // _SECTOR_BYTES * _SECTOR_BYTES
            length = draw.choice((draw.randrange(len(change.data) + 1), sectors))
            torn = draw.choice(
                (bytes(len(change.data)), change.data[:length], change.data[:length] + bytes(len(change.data) - length))
            )
            kept.append(Write(change.file, change.offset, torn))
    return _with(file.durable, kept)


def _tree(state: State, folders: set[int], number: int = ROOT, name: str = "") -> Iterator[tuple[str, bytes | None]]:
    """Yield every folder (with None) before its entries, and every file with its content."""
    for entry, node in sorted(state.entries.get(number, {}).items()):
        inner = f"{name}/{entry}" if name else entry
        if node in folders:
            yield inner, None
            yield from _tree(state, folders, node, inner)
        else:
            yield inner, state.contents.get(node, b"")


def write_state(state: State, recording: Recording, folder: Path) -> None:
    """Create `folder`, which must not exist, with the content of a state."""
    folder.mkdir(parents=True)
    for name, content in _tree(state, recording.folders):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def digest_of_state(state: State, recording: Recording) -> int:
    """Return a number that is the same for states with the same files."""
    return hash(tuple(_tree(state, recording.folders)))
