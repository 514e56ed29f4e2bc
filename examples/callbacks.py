"""Hooks that write a diary of the run, and stop it when the validation loss no longer decreases.

    python -m trainer train --extension examples/callbacks.py ...

The diary is `diary.jsonl` in the run directory, with one JSON object per line. If the environment variable COPY_CHECKPOINTS_TO
names a folder, each checkpoint is copied there, in the same layout.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from trainer.api import Evaluation, GuardError, RunView, StepMetrics, checkpoint_files

PATIENCE_STEPS = 2000


def on_train_start(run: RunView) -> None:
    """Write the step at which the training starts or resumes."""
    _note(run, "start", ranks=run.world_size, weights=sum(weight.numel() for weight in run.model.parameters()))


def on_step_end(run: RunView, metrics: StepMetrics) -> None:
    """Write each step whose gradient norm is more than ten times the clipping norm."""
    if metrics.grad_norm > 10 * run.config.optim.clip_norm:
        _note(run, "large gradient", norm=metrics.grad_norm, loss=metrics.loss)


def on_evaluate(run: RunView, evaluation: Evaluation) -> None:
    """Write the loss. A GuardError ends the training on every rank with exit code 5 and keeps the checkpoints."""
    _note(run, "evaluation", loss=evaluation.loss)
    best_step = run.progress.best_step
    if best_step is not None and run.progress.step - best_step >= PATIENCE_STEPS:
        raise GuardError(f"the validation loss has not fallen since step {best_step}; that checkpoint is the best")


def on_save(run: RunView, step: int, path: Path) -> None:
    """Write the checkpoint and its size, and copy it. `path` contains the manifest; the tensors are in a folder next to it.

    Training waits for the copy. If `checkpoint.keep_last` is at least 2, the checkpoint is not deleted before it is copied.
    """
    if run.is_main:
        files = checkpoint_files(path)
        _note(run, "checkpoint", of_step=step, bytes=sum(file.stat().st_size for file in files))
        if folder := os.environ.get("COPY_CHECKPOINTS_TO"):
            _copy(files, path.parent, Path(folder))


def on_train_end(run: RunView) -> None:
    """Write the end of the training."""
    _note(run, "end")


def _copy(files: list[Path], source: Path, target: Path) -> None:
    """Copy the tensors, then the manifest, each with a temporary name until it is complete. Skip tensors that exist already."""
    for file in files:
        copy = target / file.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            unfinished = copy.with_name(f"{copy.name}.part")
            shutil.copyfile(file, unfinished)
            unfinished.replace(copy)


def _note(run: RunView, event: str, **facts: Any) -> None:
    """Write an event on rank 0. Hooks are called on every rank."""
    if run.is_main:
        with (run.config.run / "diary.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "step": run.progress.step} | facts) + "\n")
