"""Hooks that log a curve, write a diary of the run, copy checkpoints, and stop when the validation loss no longer decreases.

    trainer train --extension examples/callbacks.py ...

The diary is `diary.jsonl` in the run directory, with one JSON object per line. If the environment variable COPY_CHECKPOINTS_TO
names a folder, each checkpoint is copied into a folder there.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from trainer.api import Evaluation, GuardError, RunView, StepMetrics

PATIENCE_STEPS = 2000


def on_train_start(run: RunView) -> None:
    """Write the step at which the training starts or resumes."""
    _note(run, "start", ranks=run.world_size, weights=sum(weight.numel() for weight in run.model.parameters()))


def on_step_end(run: RunView, metrics: StepMetrics) -> None:
    """Log the gradient norm relative to the clipping norm. Write each step in which it is more than ten."""
    clipped_by = metrics.grad_norm / run.config.optim.clip_norm
    run.log_scalar("clipped_by", clipped_by)
    if clipped_by > 10:
        _note(run, "large gradient", norm=metrics.grad_norm, loss=metrics.loss)


def on_evaluate(run: RunView, evaluation: Evaluation) -> None:
    """Write the loss. A GuardError ends the training on every rank with exit code 5 and keeps the checkpoints."""
    _note(run, "evaluation", loss=evaluation.loss)
    best_step = run.progress.best_step
    if best_step is not None and run.progress.step - best_step >= PATIENCE_STEPS:
        raise GuardError(f"the validation loss has not fallen since step {best_step}; that checkpoint is the best")


def on_save(run: RunView, step: int, path: Path) -> None:
    """Write the checkpoint and its size, and copy it. `path` exists until this function returns, so training waits for the copy.

    The copy gets its name when it is complete. To continue from it, copy what it holds into the folder `checkpoints` of a run.
    """
    if run.is_main:
        _note(run, "checkpoint", of_step=step, bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        if folder := os.environ.get("COPY_CHECKPOINTS_TO"):
            unfinished = Path(folder, f"{path.name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(path, unfinished)
            shutil.rmtree(Path(folder, path.name), ignore_errors=True)
            unfinished.rename(Path(folder, path.name))


def on_train_end(run: RunView) -> None:
    """Write the end of the training."""
    _note(run, "end")


def _note(run: RunView, event: str, **facts: Any) -> None:
    """Write an event on rank 0. Hooks are called on every rank."""
    if run.is_main:
        with (run.config.run / "diary.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "step": run.progress.step} | facts) + "\n")
