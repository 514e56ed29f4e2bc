"""Checkpoints: a directory for each saved step, complete or absent, every file with its digest; nothing in it is executable.

    checkpoints/step-00000500/manifest.json          step, and bytes and sha256 of the other files
                              model.safetensors      weights by name
                              optimizer.safetensors  moments by `<weight>/<kind>`
                              state.json             counters and whatever else is plain data

A directory gets its name by a rename after all of it is on the device, so what has that name is whole. It is verified all
the same before it is used, because storage can change afterwards.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.errors import CheckpointError
from data_pipeline.files import canonical_json, commit_directory, digest_file, sealed, sync_directory, unsealed, write_atomic

__all__ = ["Checkpoint", "CheckpointStore"]

_log = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a run at one step; tensors are on the CPU."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of one run. One process writes; any number may read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def steps(self) -> list[int]:
        """The saved steps, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(match[1]) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name)))

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return self.directory / f"step-{step:08d}"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, durably: when this returns, a power failure cannot take it away.

        Raises:
            OSError: no space, no permission or a failing device; nothing partial is left, and earlier checkpoints are untouched.
        """
        temporary = self.directory / f".{self.path(checkpoint.step).name}.tmp"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.discard_unfinished()
        temporary.mkdir()
        try:
            _write_tensors(temporary / "model.safetensors", checkpoint.model)
            _write_tensors(temporary / "optimizer.safetensors", checkpoint.optimizer)
            (temporary / "state.json").write_bytes(canonical_json(checkpoint.state))
            files = {path.name: {"bytes": path.stat().st_size, "sha256": digest_file(path)} for path in sorted(temporary.iterdir())}
            write_atomic(temporary / "manifest.json", sealed({"format": _FORMAT, "step": checkpoint.step, "files": files}))
            commit_directory(temporary, self.path(checkpoint.step))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.path(checkpoint.step)

    def load(self, step: int) -> Checkpoint:
        """Reads the checkpoint of `step` after verifying it.

        Raises:
            CheckpointError: there is none, or a file of it is not what was written.
        """
        self.verify(step)
        path = self.path(step)
        try:
            model, optimizer = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a safetensors file: {error}; choose another checkpoint") from error
        return Checkpoint(step, model, optimizer, json.loads((path / "state.json").read_bytes()))

    def verify(self, step: int) -> None:
        """Compares every file of a checkpoint with its manifest.

        Raises:
            CheckpointError: it names the first file that is missing or differs.
        """
        path = self.path(step)
        if not path.is_dir():
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: no checkpoint of step {step}; there are: {have}")
        try:
            manifest = unsealed((path / "manifest.json").read_bytes())
            files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
            if manifest["format"] != _FORMAT or manifest["step"] != step:
                raise ValueError(f"format {manifest['format']}, step {manifest['step']}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / 'manifest.json'}: not a checkpoint's manifest ({error})") from None
        for name in sorted({"model.safetensors", "optimizer.safetensors", "state.json"} | files.keys()):
            _verify_file(path / name, files.get(name))

    def newest_verified(self) -> int | None:
        """The highest step whose checkpoint verifies, or None when nothing was ever saved.

        A damaged one is reported, and kept under the name `.bad-step-…` for inspection.

        Raises:
            CheckpointError: there are checkpoints and all are damaged; training anew silently would lose the run.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                self.verify(step)
            except CheckpointError as error:
                _log.warning("%s; falling back to an earlier checkpoint", error)
                damaged.append(str(error))
                self._quarantine(step)
            else:
                return step
        bad = [path.name for path in self.directory.glob(".bad-step-*")] if self.directory.is_dir() else []
        if damaged or bad:
            raise CheckpointError(
                f"{self.directory}: no intact checkpoint is left (damaged: {', '.join(sorted(bad))}); "
                "restore one from a copy, or start anew "
                "under another --run"
            )
        return None

    def _quarantine(self, step: int) -> None:
        name = self.path(step).name
        earlier = len(list(self.directory.glob(f".bad-{name}*")))
        self.path(step).rename(self.directory / f".bad-{name}{f'-{earlier}' if earlier else ''}")
        sync_directory(self.directory)

    def retain(self, keep: Iterable[int]) -> None:
        """Deletes all checkpoints but those of the steps in `keep`; the newest one stays in any case."""
        steps = self.steps()
        for step in steps[:-1]:
            if step not in set(keep):
                doomed = self.directory / f".{self.path(step).name}.deleted"
                self.path(step).rename(doomed)  # no half-deleted checkpoint ever has a checkpoint's name
                shutil.rmtree(doomed)

    def discard_unfinished(self) -> None:
        """Removes what a killed process left half written or half deleted."""
        for pattern in (".step-*.tmp", ".step-*.deleted"):
            for leftover in self.directory.glob(pattern):
                shutil.rmtree(leftover)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _verify_file(path: Path, expected: tuple[int, str] | None) -> None:
    if expected is None:
        raise CheckpointError(f"{path}: not listed in the checkpoint's manifest")
    num_bytes, digest = expected
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    if path.stat().st_size != num_bytes:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes, but {num_bytes} were written")
    if (found := digest_file(path)) != digest:
        raise CheckpointError(f"{path}: digest {found}, but {digest} was written")
