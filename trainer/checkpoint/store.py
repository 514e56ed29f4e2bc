"""The checkpoints of a run: saving, verifying, falling back to an earlier one, and deleting those that are not needed."""

from __future__ import annotations

import errno
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.filesystem import Storage, make_directories, read_file, remove_directory, sync_directory, write_file
from trainer.checkpoint.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, OtherFormatError, encode_manifest, parse_manifest
from trainer.checkpoint.objects import LARGE_BYTES, ObjectFiles, damage_named

__all__ = ["Checkpoint", "CheckpointStore", "steps_to_keep"]

_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_OBJECTS = "objects"
_NAME = re.compile(r"step-(\d{8,})")
_BAD = re.compile(r"\.bad-step-\d{8,}(-\d+)?")
_TRASH = re.compile(r"\.step-\d{8,}\.(tmp|deleted)")
_GROUPS = ("model", "optimizer", "average")


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a run at one step; tensors are on the CPU."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]
    """Plain data, as JSON holds it."""
    average: Mapping[str, Tensor] = field(default_factory=dict)
    """The moving average of the weights, if there is one."""


def steps_to_keep(steps: Iterable[int], *, last: int, every: int | None = None, best: int | None = None) -> set[int]:
    """Those of `steps` that retention spares: the newest `last`, the multiples of `every`, and the `best`.

    It goes by step alone; a clock that was set back changes nothing.
    """
    there = sorted(steps)
    return {step for place, step in enumerate(there) if place >= len(there) - last or step == best or (every and step % every == 0)}


class CheckpointStore:
    """The checkpoints of one run.

    `steps`, `path`, `verify` and `load` only read. The other methods change the directory: they belong to the one process that
    has the run's lock, and to one thread of it at a time.
    """

    def __init__(self, directory: Path, storage: Storage | None = None, *, large_bytes: int = LARGE_BYTES) -> None:
        self.directory = directory
        self._storage = storage or Storage()
        self._objects = ObjectFiles(directory / _OBJECTS, self._storage, large_bytes)
        self._prepared = False

    def steps(self) -> list[int]:
        """The saved steps, oldest first."""
        steps = [(int(match[1]), name) for name in self._names() if (match := _NAME.fullmatch(name))]
        return sorted(step for step, name in steps if self.path(step).name == name)

    def path(self, step: int) -> Path:
        """Where the manifest of `step` is; its tensors are in the object files that it names."""
        return self.directory / f"step-{step:08d}"

    def manifest_path(self, step: int) -> Path:
        """Where `step` says what it holds."""
        return self.path(step) / _MANIFEST

    def manifest_bytes(self, step: int) -> bytes:
        """The file in which `step` says what it holds, unchecked.

        Raises:
            CheckpointError: it is missing, no regular file, larger than a manifest may be, or in a folder that is a link.
        """
        self._check_folders(self.path(step))
        path = self.manifest_path(step)
        with damage_named(path):
            return bytes(read_file(self._storage, path, MAX_MANIFEST_BYTES))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, durably: when this returns, a power failure cannot take it away.

        An earlier checkpoint of the same step is replaced, at once or not at all.

        Raises:
            OSError: no space, no permission or a failing device; nothing partial is left, and earlier checkpoints are untouched.
            ValueError: the state is no plain data, or a tensor has a type that cannot be saved.
            CheckpointError: the directory is a link.
        """
        tensors = {f"{group}/{name}": tensor for group in _GROUPS for name, tensor in getattr(checkpoint, group).items()}
        self._prepare()
        try:
            self.discard_unfinished()
            stored, objects = self._objects.store(tensors, self._readable_manifests())
            self._commit(checkpoint.step, encode_manifest(CheckpointManifest(checkpoint.step, objects, stored, checkpoint.state)))
        except BaseException:
            with suppress(OSError, CheckpointError):  # what cannot be removed now is removed at the next start
                self.collect_trash()
            raise
        return self.path(checkpoint.step)

    def load(self, step: int) -> Checkpoint:
        """Reads the checkpoint of `step`; every byte is verified before it is used.

        Raises:
            CheckpointError: there is none, or a file of it is not what was written; the message names the file.
            ConfigError: a file of it does not fit the memory that this machine has left.
        """
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
        with _advised():
            manifest = self._manifest(step)
            for full_name, tensor in self._objects.read(manifest):
                group, _, name = full_name.partition("/")
                groups[group][name] = tensor
        return Checkpoint(step, state=manifest.state, **groups)

    def num_weights(self, step: int) -> int:
        """Weights of the model in the checkpoint of `step`, as its manifest says; no tensor is read.

        Raises:
            CheckpointError: there is no such checkpoint, or its manifest is damaged.
        """
        with _advised():
            tensors = self._manifest(step).tensors
        return sum(math.prod(stored.spec.shape) for name, stored in tensors.items() if name.startswith("model/"))

    def verify(self, step: int) -> None:
        """Reads a checkpoint as `load` does, and keeps nothing of it.

        Raises:
            CheckpointError: it names the first file that is missing or differs.
        """
        with _advised():
            self._read_through(step)

    def newest_verified(self) -> int | None:
        """The highest step whose checkpoint verifies, or None when nothing was ever saved.

        A damaged one is reported, and kept under the name `.bad-step-…` for inspection. What a killed process left behind
        is removed.

        Raises:
            CheckpointError: there are checkpoints and all are damaged, or one was written in another format; training anew silently
                would lose the run.
        """
        for step in reversed(self.steps()):
            try:
                self._read_through(step)
            except CheckpointError as error:
                if isinstance(error.__cause__, OtherFormatError):
                    raise
                self._set_aside(step, f"{error}; falling back to an earlier checkpoint")
            else:
                # A killed process may have given it its name without forcing that to the device. What follows is built on it.
                sync_directory(self._storage, self.path(step))
                sync_directory(self._storage, self.directory)
                self.collect_trash()
                return step
        if bad := [name for name in self._names() if _BAD.fullmatch(name)]:
            raise CheckpointError(
                f"{self.directory}: no intact checkpoint is left (damaged: {', '.join(bad)}); "
                "restore one from a copy, or start anew under another --run"
            )
        self.collect_trash()
        return None

    def retain(self, keep: Iterable[int]) -> None:
        """Deletes all checkpoints but those of the steps in `keep`; the newest one stays in any case.

        Raises:
            CheckpointError: the newest one, read back, is damaged; nothing was deleted.
        """
        steps, spared = self.steps(), set(keep)
        doomed = [step for step in steps[:-1] if step not in spared]
        if doomed:
            self.verify(steps[-1])
            self._discard_directories()  # a name that an interrupted deletion left would be in the way
            for step in doomed:  # no half-deleted checkpoint ever has a checkpoint's name
                self._storage.rename(self.path(step), self.directory / f".{self.path(step).name}.deleted")
        self.collect_trash()

    def collect_trash(self) -> None:
        """Removes what was left half written or half deleted, and the object files that no manifest names any more.

        Checkpoints that were set aside as `.bad-…` keep their objects until the user deletes their directories.
        """
        if not self._storage.is_directory(self.directory / _OBJECTS):
            return
        self.discard_unfinished()
        try:
            named = {name for manifest in self._all_manifests() for name in manifest.objects}
        except CheckpointError as error:
            _log.warning("%s; no object file is deleted as long as this cannot be read", error)
            return
        orphans = [name for name in self._objects.names() if name not in named]
        for step in self.steps() if orphans else ():
            # A manifest that was replaced may not be on the device yet; a power failure would bring back the one that names them.
            sync_directory(self._storage, self.path(step))
        for name in orphans:
            self._storage.unlink(self._objects.path(name))

    def discard_unfinished(self) -> None:
        """Removes what a killed process left half written or half deleted."""
        self._discard_directories()
        if self._storage.is_directory(self._objects.directory):
            self._objects.discard_unfinished()

    def _discard_directories(self) -> None:
        trash = [name for name in self._names() if _TRASH.fullmatch(name)]
        if trash:
            # Until then a power failure may give an emptied directory its checkpoint's name back, also when its objects are gone.
            sync_directory(self._storage, self.directory)
        for name in trash:
            remove_directory(self._storage, self.directory / name)

    def _prepare(self) -> None:
        if self._prepared:
            return
        make_directories(self._storage, self._objects.directory)
        for folder in (self.directory, self._objects.directory):
            if not self._storage.is_directory(folder):
                raise CheckpointError(f"{folder}: not a directory, but a link or a file; remove it, or use another --run")
        sync_directory(self._storage, self.directory.parent)  # a killed process may have made the directory and not have synced it
        self._prepared = True

    def _commit(self, step: int, manifest: bytes) -> None:
        final = self.path(step)
        unfinished = self.directory / f".{final.name}.tmp"
        self._storage.make_directory(unfinished)
        write_file(self._storage, unfinished / _MANIFEST, manifest)
        sync_directory(self._storage, unfinished)
        if self._storage.is_directory(final):
            self._storage.rename(unfinished / _MANIFEST, final / _MANIFEST)
            sync_directory(self._storage, final)
            self._storage.remove_directory(unfinished)
            sync_directory(self._storage, self.directory)
            return
        self._storage.rename(unfinished, final)
        try:
            sync_directory(self._storage, self.directory)
        except BaseException:
            self._storage.rename(final, unfinished)
            raise

    def _read_through(self, step: int) -> None:
        for _ in self._objects.read(self._manifest(step)):
            pass

    def _manifest(self, step: int) -> CheckpointManifest:
        path = self.path(step)
        if not self._storage.is_directory(path) and step not in self.steps():
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: no checkpoint of step {step}; there are: {have}")
        manifest = self._read_manifest(path)
        with damage_named(path):
            names = self._storage.names(path)
        if extra := [name for name in names if name != _MANIFEST and not name.startswith(".")]:
            raise CheckpointError(f"{path / extra[0]}: not part of a checkpoint")
        if manifest.step != step:
            raise CheckpointError(f"{path / _MANIFEST}: it belongs to step {manifest.step}")
        return manifest

    def _read_manifest(self, directory: Path) -> CheckpointManifest:
        path = directory / _MANIFEST
        self._check_folders(directory, self._objects.directory)
        with damage_named(path):
            manifest = parse_manifest(bytes(read_file(self._storage, path, MAX_MANIFEST_BYTES)))
            if unknown := {name.partition("/")[0] for name in manifest.tensors} - set(_GROUPS):
                raise ValueError(f"unknown groups of tensors: {', '.join(sorted(unknown))}")
        return manifest

    def _check_folders(self, *folders: Path) -> None:
        for folder in (self.directory, *folders):
            if not self._storage.is_directory(folder):
                raise CheckpointError(f"{folder}: not a directory")

    def _readable_manifests(self) -> list[CheckpointManifest]:
        """Those of the checkpoints, newest first; a damaged one is not a reason to stop saving."""
        manifests = []
        for step in reversed(self.steps()):
            with suppress(CheckpointError):
                manifests.append(self._manifest(step))
        return manifests

    def _all_manifests(self) -> Iterator[CheckpointManifest]:
        """Those whose objects must stay; a damaged one among the checkpoints is set aside, since it says nothing any more.

        Raises:
            CheckpointError: the device did not give one, which it may the next time, or another version wrote it; what it says is
                not known.
        """
        for step in self.steps():
            try:
                yield self._manifest(step)
            except CheckpointError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(step, str(error))
        for name in self._names():
            if _BAD.fullmatch(name):
                try:
                    yield self._read_manifest(self.directory / name)
                except CheckpointError as error:
                    if not _is_damage(error):
                        raise

    def _set_aside(self, step: int, reason: str) -> None:
        taken = set(self._names())
        name = f".bad-{self.path(step).name}"
        number = 0
        while (free := f"{name}-{number}" if number else name) in taken:
            number += 1
        _log.warning("%s; it is kept as %s", reason, free)
        self._storage.rename(self.path(step), self.directory / free)
        sync_directory(self._storage, self.directory)

    def _names(self) -> list[str]:
        if not self._storage.is_directory(self.directory):
            try:
                self._storage.names(self.directory)
            except FileNotFoundError:
                return []
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
            raise CheckpointError(
                f"{self.directory} is a link or a file; the checkpoints of a run are in a directory of that name: put it back"
            )
        return self._storage.names(self.directory)


@contextmanager
def _advised() -> Iterator[None]:
    """Adds what the user can do to an error that says what is wrong."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; choose another checkpoint") from error


def _is_damage(error: CheckpointError) -> bool:
    cause = error.__cause__
    return not isinstance(cause, OtherFormatError) and not (isinstance(cause, OSError) and cause.errno == errno.EIO)
