"""An extension of the trainer that records what each rank does, and that can make the run slow or broken.

Environment variables configure it: JOURNAL_PACE_S pauses after each step. JOURNAL_SAVE_S and JOURNAL_EVALUATION_S make saves and
evaluations slower. JOURNAL_FLAW breaks the product with one of `FLAWS`. The journal is a file next to the run folder with one line
for each event. It survives any kill, because each line is one write to a file that is opened for appending.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.checkpoints import believed
from trainer.checkpoint.objects import ObjectFiles
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.extensions.hooks import RunView
from trainer.metrics.sinks.base import StepMetrics

EXTENSION = """from tests.support.journal import on_save, on_step_end, on_train_end, on_train_start, prepare
prepare()
"""
"""Content of the file for `--extension`."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    rank: int
    event: str
    """One of these events: start (from the checkpoint of `step`), step (made and reported), saving, saved, evaluating, end.

    `damaged` is written by the test: all checkpoints newer than that of `step` are damaged.
    """
    step: int


def read_journal(run: Path) -> list[Entry]:
    """Return the entries that the ranks have written so far, in order of time."""
    path = _path(run)
    lines = path.read_text().splitlines() if path.exists() else []
    return [Entry(int(rank), event, int(step)) for rank, event, step in map(str.split, lines)]


def write_damaged(run: Path, step: int) -> None:
    """Record that the checkpoint of `step` is now the newest intact one."""
    _append(_path(run), 0, "damaged", step)


def prepare() -> None:
    """Make this process slow or broken, as its environment variables say."""
    if flaw := os.environ.get("JOURNAL_FLAW"):
        FLAWS[flaw]()
    _slow_saves(float(os.environ.get("JOURNAL_SAVE_S", "0")))


def on_train_start(run: RunView) -> None:
    _write(run, "start", run.progress.step)
    if seconds := float(os.environ.get("JOURNAL_EVALUATION_S", "0")):
        _slow_evaluations(run, seconds)


def on_step_end(run: RunView, metrics: StepMetrics) -> None:
    _write(run, "step", metrics.step)
    time.sleep(float(os.environ.get("JOURNAL_PACE_S", "0")))


def on_save(run: RunView, step: int, path: Path) -> None:
    assert path.is_dir()
    _write(run, "saved", step)


def on_train_end(run: RunView) -> None:
    _write(run, "end", run.progress.step)


def _path(run: Path) -> Path:
    return run.with_suffix(".journal")


def _append(path: Path, rank: int, event: str, step: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, f"{rank} {event} {step}\n".encode())
    os.close(file)


def _write(run: RunView, event: str, step: int) -> None:
    _append(_path(run.config.run), run.rank, event, step)


def _slow_saves(seconds: float) -> None:
    save = CheckpointStore.save

    def slowly(store: CheckpointStore, checkpoint: Checkpoint) -> Path:
        _append(_path(store.directory.parent), 0, "saving", checkpoint.step)
        time.sleep(seconds)
        return save(store, checkpoint)

    CheckpointStore.save = slowly  # type: ignore[method-assign]


def _slow_evaluations(run: RunView, seconds: float) -> None:
    model: Any = run.model

    def wait(layer: Any, _arguments: object) -> None:
        if not layer.training:
            _write(run, "evaluating", run.progress.step)
            time.sleep(seconds)

    model.model.layers[0].register_forward_pre_hook(wait)


# Broken variants


def _restored_as(change: Callable[[Checkpoint], Checkpoint]) -> None:
    load = CheckpointStore.load
    CheckpointStore.load = lambda store, step: change(load(store, step))  # type: ignore[method-assign]


def _without_optimizer() -> None:
    _restored_as(lambda one: replace(one, optimizer={name: tensor * 0 for name, tensor in one.optimizer.items()}))


def _one_batch_further() -> None:
    def change(one: Checkpoint) -> Checkpoint:
        progress = one.state["progress"]
        rows_of_a_step = progress["rows"] // max(1, progress["step"])
        return replace(one, state={**one.state, "progress": {**progress, "rows": progress["rows"] + rows_of_a_step}})

    _restored_as(change)


def _overwriting() -> None:
    """Keep one checkpoint and delete it before the next is written. The first gap is long, so that few kills suffice."""
    save, gaps = CheckpointStore.save, [0.5]

    def overwrite(store: CheckpointStore, checkpoint: Checkpoint) -> Path:
        for step in store.steps():
            shutil.rmtree(store.path(step))
            time.sleep(gaps.pop() if gaps else 0)
        return save(store, checkpoint)

    CheckpointStore.save = overwrite  # type: ignore[method-assign]


def _believing() -> None:
    ObjectFiles._read_object = believed  # type: ignore[method-assign]


FLAWS: dict[str, Callable[[], None]] = {
    "optimizer state left out at the restore": _without_optimizer,
    "one batch left out at the restore": _one_batch_further,
    "overwrites its one checkpoint": _overwriting,
    "believes a file whatever its digest": _believing,
}
