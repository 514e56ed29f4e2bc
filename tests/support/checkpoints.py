"""Tools that compare the claims of a checkpoint store with the files on disk, and a process that is killed while it saves.

`python -m tests.support.checkpoints save|retain DIRECTORY FIRST_SEED COUNT [FLAW]` forks a child for each seed, kills the child at
a random time, checks the files that remain, and prints the problems as JSON. With a flaw the command ends at the first problem.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.filesystem import Storage, read_file
from trainer.checkpoint.objects import ObjectFiles, damage_named
from trainer.checkpoint.store import Checkpoint, CheckpointStore, steps_to_keep
from trainer.checkpoint.tensor_file import decode_tensors
from trainer.runs.manifest import MAX_MANIFEST_BYTES, CheckpointManifest

from .storage import Sloppy

LARGE_BYTES = 64
"""Size in bytes from which these tests store a tensor in a separate file."""
HISTORY = ((10, 0), (20, 0), (20, 1), (30, 0), (40, 0))
"""Pairs of step and version, in the order in which they are saved. Step 20 is saved twice."""
KEEP_LAST = 2


def contents(step: int, version: int = 0, scale: int = 1) -> Checkpoint:
    """Return the only correct content for a step. Some tensors are the same in all steps, others differ in each step."""
    draw = torch.Generator().manual_seed(1000 * step + version)
    model = {
        "embedding.weight": torch.arange(24.0 * scale),
        "embedding.bias": torch.arange(3.0),
        "hidden.weight": torch.randn(5, 4 * scale, generator=draw),
        "hidden.bias": torch.randn(3, generator=draw).bfloat16(),
    }
    moments = {"hidden.weight/exp_avg": torch.randn(5, 4 * scale, generator=draw), "hidden.bias/step": torch.tensor(step)}
    return Checkpoint(step, model, moments, {"progress": {"step": step, "version": version}})


def same(first: Checkpoint, second: Checkpoint) -> bool:
    """Return whether two checkpoints have the same step, state and tensors."""

    def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return one.keys() == other.keys() and all(
            tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
        )

    groups = ("model", "optimizer", "average")
    return (first.step, first.state) == (second.step, second.state) and all(
        equal(dict(getattr(first, group)), dict(getattr(second, group))) for group in groups
    )


@dataclass
class Claims:
    """The results that the store has reported."""

    acknowledged: tuple[int, int] | None = None
    """Step and version of the newest save that returned."""
    errors: list[str] = field(default_factory=list)


def work(
    store: CheckpointStore,
    claims: Claims,
    history: Iterable[tuple[int, int]] = HISTORY,
    on_error: Callable[[str], None] | None = None,
) -> None:
    """Save and delete checkpoints as a training run does.

    With `on_error`, continue after a failure and pass the failed stage (`save` or `retain`) to `on_error`.
    """
    for step, version in history:
        stage = "save"
        try:
            store.save(contents(step, version))
            claims.acknowledged = (step, version)
            stage = "retain"
            store.retain(steps_to_keep(store.steps(), last=KEEP_LAST))
        except (OSError, CheckpointError) as error:
            if on_error is None:
                raise
            claims.errors.append(str(error))
            on_error(stage)


def problems(storage: Storage, directory: Path, claims: Claims, *, scale: int = 1) -> list[str]:
    """Return all problems that a new process finds after it has looked for the newest checkpoint."""
    store = CheckpointStore(directory, storage, large_bytes=LARGE_BYTES)
    try:
        newest = store.newest_verified()
    except CheckpointError as error:
        return [f"nothing intact: {error}"]
    if newest is None:
        return [f"lost: {claims.acknowledged} was acknowledged, nothing is there"] if claims.acknowledged else []
    found = []
    if claims.acknowledged and newest < claims.acknowledged[0]:
        found.append(f"lost: {claims.acknowledged} was acknowledged, the newest is {newest}")
    for step in store.steps():
        try:
            loaded = store.load(step)
        except CheckpointError as error:
            found.append(f"dangling: {error}")
            continue
        version = loaded.state["progress"]["version"]
        if not same(loaded, contents(step, version, scale)):
            found.append(f"wrong: the content of step {step}")
        if claims.acknowledged and step == claims.acknowledged[0] and version < claims.acknowledged[1]:
            found.append(f"lost: version {claims.acknowledged[1]} of step {step} was acknowledged, {version} is there")
    return found + [f"left: {name}" for name in leftovers(storage, directory)]


def leftovers(storage: Storage, directory: Path) -> list[str]:
    """Return the names of files that belong to no checkpoint, and of checkpoints that were set aside."""
    names = storage.names(directory)
    steps = [name for name in names if re.fullmatch(r"step-\d{8}", name)]
    wanted = set()
    for name in steps:
        manifest = CheckpointManifest.from_file(bytes(read_file(storage, directory / name / "manifest.json", MAX_MANIFEST_BYTES)))
        wanted |= {f"{digest}.safetensors" for digest in manifest.objects}
    strangers = [name for name in names if name not in (*steps, "objects")]
    return strangers + [f"objects/{name}" for name in storage.names(directory / "objects") if name not in wanted]


def believed(files: ObjectFiles, name: str, num_bytes: int) -> dict[str, Tensor]:
    """Read an object file without checking its digest. Replaces the reader of the product in a broken variant."""
    path = files.path(name)
    with damage_named(path):
        return decode_tensors(read_file(files._storage, path, num_bytes))


class Careless(CheckpointStore):
    """A broken store that deletes in place: objects first, then the checkpoints that refer to these objects."""

    def retain(self, keep: Iterable[int]) -> None:
        doomed = [step for step in self.steps()[:-1] if step not in set(keep)]
        manifests = {step: self._manifest(step) for step in self.steps()}
        needed = {name for step, manifest in manifests.items() if step not in doomed for name in manifest.objects}
        for step in doomed:
            for name in manifests[step].objects:
                if name not in needed:
                    (self.directory / "objects" / f"{name}.safetensors").unlink(missing_ok=True)
            shutil.rmtree(self.path(step))


class Overwriting(CheckpointStore):
    """A broken store that keeps one checkpoint and deletes it before it writes the next one."""

    def save(self, checkpoint: Checkpoint) -> Path:
        for step in self.steps():
            shutil.rmtree(self.path(step))
        return super().save(checkpoint)


SCALE = 4096
"""Factor on tensor sizes: with tensors of up to 400 kB, writing takes a large part of a save."""
STEPS_BEFORE_DELETION = 12


def _store(directory: Path, flaw: str | None) -> CheckpointStore:
    kinds = {"careless": Careless, "overwriting": Overwriting}
    storage = Sloppy(Storage(), {flaw}) if flaw and flaw not in kinds else Storage()
    return kinds.get(flaw or "", CheckpointStore)(directory, storage, large_bytes=LARGE_BYTES)


def _save_until_killed(directory: Path, flaw: str | None, tell: int) -> None:
    store = _store(directory, flaw)
    for step in range(1, 1000):
        store.save(contents(step, 0, SCALE))
        os.write(tell, step.to_bytes(4, "little"))
        store.retain(steps_to_keep(store.steps(), last=KEEP_LAST))


def _retain_until_killed(directory: Path, flaw: str | None, tell: int) -> None:
    store = _store(directory, flaw)
    os.write(tell, STEPS_BEFORE_DELETION.to_bytes(4, "little"))
    store.retain([])


def _killed_after(seconds: float, action: Callable[[int], None], *, from_first_word: bool) -> tuple[int | None, bool]:
    """Kill a child that runs `action`. Return the last number that the child sent, and whether the child was still working."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        action(tell)
        os._exit(0)
    os.close(tell)
    heard = os.read(hear, 4) if from_first_word else b""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    while part := os.read(hear, 4096):
        heard += part
    os.close(hear)
    return int.from_bytes(heard[-4:], "little") if heard else None, killed


def _campaign(mode: str, base: Path, first_seed: int, count: int, flaw: str | None) -> dict[str, object]:
    template = base / "template"
    template.mkdir(parents=True)
    store = CheckpointStore(template, large_bytes=LARGE_BYTES)
    if mode == "save":
        action, scale = _save_until_killed, SCALE
        longest_s = 4 * _seconds(lambda: CheckpointStore(base / "trial").save(contents(1, 0, SCALE)))
    else:
        action, scale = _retain_until_killed, 64
        for step in range(1, STEPS_BEFORE_DELETION + 1):
            store.save(contents(step, 0, scale))
        shutil.copytree(template, base / "trial")
        longest_s = _seconds(lambda: _store(base / "trial", flaw).retain([]))
    bad: dict[int, list[str]] = {}
    at_work = num_saved = 0
    for seed in range(first_seed, first_seed + count):
        directory = base / f"run-{seed}"
        shutil.copytree(template, directory)
        delay_s = random.Random(seed).uniform(0, longest_s)
        told, killed = _killed_after(delay_s, partial(action, directory, flaw), from_first_word=mode == "retain")
        at_work += killed
        num_saved += (told or 0) if mode == "save" else 0
        if found := problems(Storage(), directory, Claims(None if told is None else (told, 0)), scale=scale):
            bad[seed] = found
            if flaw:  # one example shows that the flaw is noticed
                break
        shutil.rmtree(directory)
    return {"bad": bad, "killed at work": at_work, "saves acknowledged": num_saved, "longest delay": longest_s}


def _seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    _mode, _base, _first, _count, *_flaw = sys.argv[1:]
    print(json.dumps(_campaign(_mode, Path(_base), int(_first), int(_count), _flaw[0] if _flaw else None)))
