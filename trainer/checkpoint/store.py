"""The checkpoints of a run: save, verify, fall back to an earlier one, and delete those that are not needed."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from common.files import sealed
from common.terminal import progress_shown
from trainer.checkpoint.filesystem import Storage, make_directories, read_file, remove_directory, sync_directory, write_file
from trainer.checkpoint.objects import LARGE_BYTES, ObjectFiles, damage_named
from trainer.runs.layout import CHECKPOINT_MANIFEST, CHECKPOINTS, OBJECTS, STEP_FOLDER, object_path, step_folder, steps_among
from trainer.runs.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, OtherFormatError

_log = logging.getLogger(__name__)
_BAD = re.compile(rf"\.bad-{STEP_FOLDER}(-\d+)?")
_TRASH = re.compile(rf"\.{STEP_FOLDER}\.(tmp|deleted)")
_GROUPS = ("model", "optimizer", "average")


@dataclass(frozen=True)
class Checkpoint:
    """The complete state of a run at one step, with all tensors on the CPU."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]  # plain data that JSON can represent
    average: Mapping[str, Tensor] = field(default_factory=dict)  # the moving average of the weights; empty if the run has none


def steps_to_keep(steps: Iterable[int], *, last: int, every: int | None = None, best: int | None = None) -> set[int]:
    """Keep the newest `last`, the multiples of `every`, and the `best`. Only step numbers count, so clocks have no effect."""
    there = sorted(steps)
    return {step for place, step in enumerate(there) if place >= len(there) - last or step == best or (every and step % every == 0)}


def checkpoint_files(path: Path) -> list[Path]:
    """Return the object files of a checkpoint folder such as `checkpoints/step-00000500`, then its manifest.

    A copy keeps their paths relative to the folder of the checkpoints. It is complete once it has the manifest. Object files never
    change and are shared between checkpoints, so skip those that the copy already has.
    """
    manifest = path / CHECKPOINT_MANIFEST
    try:
        objects = CheckpointManifest.from_file(manifest.read_bytes()).objects
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest}: {error}; name a complete checkpoint") from None
    return [*(object_path(path.parent, name) for name in objects), manifest]


def link_checkpoint(checkpoint: Path, folder: Path) -> Path | None:
    """Replace `folder` by links to a checkpoint's files. Return its folder there, None if the checkpoint was deleted meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    whole = folder / checkpoint.name
    try:
        for file in checkpoint_files(checkpoint):
            target = whole / file.relative_to(checkpoint.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target)
            except FileNotFoundError:
                raise
            except OSError:  # the file system has no hard links
                shutil.copyfile(file, target)
    except (CheckpointError, FileNotFoundError):
        shutil.rmtree(folder)
        return None
    return whole


class CheckpointStore:
    """`steps`, `path`, `verify` and `load` only read. The other methods need the run's lock, and one thread at a time."""

    def __init__(self, directory: Path, storage: Storage | None = None, *, large_bytes: int = LARGE_BYTES) -> None:
        self.directory = directory
        self._storage = storage or Storage()
        self._objects = ObjectFiles(directory / OBJECTS, self._storage, large_bytes)
        self._prepared = False
        self._verified: dict[int, CheckpointManifest] = {}  # read by `newest_verified`, until the next load, save or deletion

    @classmethod
    def of(cls, run: Path) -> CheckpointStore:
        return cls(run / CHECKPOINTS)

    def steps(self) -> list[int]:
        return steps_among(self._names())

    def path(self, step: int) -> Path:
        return self.directory / step_folder(step)

    def manifest_path(self, step: int) -> Path:
        return self.path(step) / CHECKPOINT_MANIFEST

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint. Once this returns, it survives a power failure. It replaces one of the same step atomically.

        Raises OSError if the disk is full or fails; no partial checkpoint is left, and earlier ones are unchanged. Raises
        ValueError if the state is not plain data or a tensor has a type that cannot be saved.
        """
        self._verified.clear()
        tensors = {f"{group}/{name}": tensor for group in _GROUPS for name, tensor in getattr(checkpoint, group).items()}
        earlier = []
        self._prepare()
        try:
            self.discard_unfinished()
            for step in reversed(self.steps()):
                with suppress(CheckpointError):  # a damaged one must not prevent a save
                    earlier.append(self._manifest(step))
            stored, objects = self._objects.store(tensors, earlier)
            manifest = CheckpointManifest(step=checkpoint.step, objects=objects, tensors=stored, state=dict(checkpoint.state))
            self._commit(checkpoint.step, sealed(manifest.model_dump()))
        except BaseException:
            with suppress(OSError, CheckpointError):  # the next start removes what cannot be removed now
                self.collect_trash()
            raise
        return self.path(checkpoint.step)

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of `step`. Every byte is verified before it is used."""
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
        with _advised():
            manifest = self._verified.pop(step, None) or self._manifest(step)
            with progress_shown(f"reading checkpoint {step}", len(manifest.tensors), sys.stderr) as advance:
                for full_name, tensor in self._objects.read(manifest):
                    group, _, name = full_name.partition("/")
                    groups[group][name] = tensor
                    advance()
        return Checkpoint(step, state=manifest.state, **groups)

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the plain data in the checkpoint of `step`, from its manifest. Reads no tensor."""
        with _advised():
            return (self._verified.get(step) or self._manifest(step)).state

    def verify(self, step: int) -> None:
        with _advised():
            self._read_through(step)

    def newest_verified(self) -> int | None:
        """Return the highest step whose checkpoint verifies, or None if nothing was ever saved.

        A damaged checkpoint is logged and kept as `.bad-step-…`. Leftovers of a killed process are removed. The next `load` of this
        step uses the manifest that was read. CheckpointError: all are damaged, or one has another format.
        """
        self._verified.clear()
        for step in reversed(self.steps()):
            try:
                self._verified = {step: self._read_through(step)}
            except CheckpointError as error:
                if isinstance(error.__cause__, OtherFormatError):
                    raise
                self._set_aside(step, f"{error}; falling back to an earlier checkpoint")
            else:
                # A killed process may have renamed the checkpoint without syncing the rename. Later steps depend on it.
                sync_directory(self._storage, self.path(step))
                sync_directory(self._storage, self.directory)
                self.collect_trash()
                return step
        if bad := [name for name in self._names() if _BAD.fullmatch(name)]:
            raise CheckpointError(
                f"{self.directory}: no intact checkpoint is left (damaged: {', '.join(bad)}); "
                "restore one from a copy, or start again with another --run"
            )
        self.collect_trash()
        return None

    def retain(self, keep: Iterable[int]) -> None:
        """Delete all others but the newest. CheckpointError: the newest, read back, is damaged, and nothing was deleted."""
        self._verified.clear()
        steps, spared = self.steps(), set(keep)
        doomed = [step for step in steps[:-1] if step not in spared]
        if doomed:
            self.verify(steps[-1])
            self._discard_directories()  # a leftover of an interrupted deletion would have the same name
            for step in doomed:  # a half-deleted checkpoint never has the name of a checkpoint
                self._storage.rename(self.path(step), self.directory / f".{self.path(step).name}.deleted")
        self.collect_trash()

    def collect_trash(self) -> None:
        """Remove unfinished checkpoints and the objects that no manifest names. Those set aside as `.bad-…` keep their objects."""
        if not self._storage.is_directory(self.directory / OBJECTS):
            return
        self.discard_unfinished()
        try:
            named = {name for manifest in self._all_manifests() for name in manifest.objects}
        except CheckpointError as error:
            _log.warning("%s; no object file is deleted while this file cannot be read", error)
            return
        orphans = [name for name in self._objects.names() if name not in named]
        for step in self.steps() if orphans else ():
            # If a replaced manifest is not synced yet, a power failure would restore the old one, which names these objects.
            sync_directory(self._storage, self.path(step))
        for name in orphans:
            self._storage.unlink(self._objects.path(name))

    def discard_unfinished(self) -> None:
        self._discard_directories()
        if self._storage.is_directory(self._objects.directory):
            self._objects.discard_unfinished()

    def _discard_directories(self) -> None:
        trash = [name for name in self._names() if _TRASH.fullmatch(name)]
        if trash:
            # Without this sync a power failure could undo the rename of a directory that is already empty.
            sync_directory(self._storage, self.directory)
        for name in trash:
            remove_directory(self._storage, self.directory / name)

    def _prepare(self) -> None:
        if self._prepared:
            return
        make_directories(self._storage, self._objects.directory)
        for folder in (self.directory, self._objects.directory):
            if not self._storage.is_directory(folder):
                raise CheckpointError(f"{folder}: a link or a file, not a directory; remove it, or use another --run")
        sync_directory(self._storage, self.directory.parent)  # a killed process may have created it without a sync
        self._prepared = True

    def _commit(self, step: int, manifest: bytes) -> None:
        final = self.path(step)
        unfinished = self.directory / f".{final.name}.tmp"
        self._storage.make_directory(unfinished)
        write_file(self._storage, unfinished / CHECKPOINT_MANIFEST, manifest)
        sync_directory(self._storage, unfinished)
        if self._storage.is_directory(final):
            self._storage.rename(unfinished / CHECKPOINT_MANIFEST, final / CHECKPOINT_MANIFEST)
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

    def _read_through(self, step: int) -> CheckpointManifest:
        manifest = self._manifest(step)
        for _ in self._objects.read(manifest):
            pass
        return manifest

    def _manifest(self, step: int) -> CheckpointManifest:
        path = self.path(step)
        if not self._storage.is_directory(path) and step not in self.steps():
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: no checkpoint of step {step}; there are: {have}")
        manifest = self._read_manifest(path)
        with damage_named(path):
            names = self._storage.names(path)
        if extra := [name for name in names if name != CHECKPOINT_MANIFEST and not name.startswith(".")]:
            raise CheckpointError(f"{path / extra[0]}: not part of a checkpoint")
        if manifest.step != step:
            raise CheckpointError(f"{path / CHECKPOINT_MANIFEST}: it belongs to step {manifest.step}")
        return manifest

    def _read_manifest(self, directory: Path) -> CheckpointManifest:
        path = directory / CHECKPOINT_MANIFEST
        self._check_folders(directory, self._objects.directory)
        with damage_named(path):
            manifest = CheckpointManifest.from_file(bytes(read_file(self._storage, path, MAX_MANIFEST_BYTES)))
            if unknown := {name.partition("/")[0] for name in manifest.tensors} - set(_GROUPS):
                raise ValueError(f"unknown groups of tensors: {', '.join(sorted(unknown))}")
        return manifest

    def _check_folders(self, *folders: Path) -> None:
        for folder in (self.directory, *folders):
            if not self._storage.is_directory(folder):
                raise CheckpointError(f"{folder}: not a directory")

    def _all_manifests(self) -> Iterator[CheckpointManifest]:
        """Yield the manifests whose objects must be kept. A checkpoint with a damaged manifest is set aside.

        CheckpointError: the objects are unknown, because the device could not read a manifest, which may be temporary, or another
        version of the program wrote it.
        """
        for step in self.steps():
            try:
                yield self._verified.get(step) or self._manifest(step)
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
        _log.warning("%s; the damaged checkpoint is kept as %s", reason, free)
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
                f"{self.directory} is a link or a file, and must be the directory with the checkpoints of the run; restore it"
            )
        return self._storage.names(self.directory)


@contextmanager
def _advised() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; choose another checkpoint") from error


def _is_damage(error: CheckpointError) -> bool:
    cause = error.__cause__
    return not isinstance(cause, OtherFormatError) and not (isinstance(cause, OSError) and cause.errno == errno.EIO)
