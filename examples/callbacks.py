"""Called by the training: keeps a diary of the run, and stops it when the validation loss no longer falls.

    python -m trainer train --extension examples/callbacks.py ...

The diary is `diary.jsonl` in the run directory, one object a line. With COPY_CHECKPOINTS_TO=FOLDER in the environment, each
checkpoint is copied there, in the same layout.
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
    """Notes where the training begins or goes on."""
    _note(run, "start", ranks=run.world_size, weights=sum(weight.numel() for weight in run.model.parameters()))


def on_step_end(run: RunView, metrics: StepMetrics) -> None:
    """Notes steps whose gradient was more than ten times the size at which it is clipped."""
    if metrics.grad_norm > 10 * run.config.optim.clip_norm:
        _note(run, "large gradient", norm=metrics.grad_norm, loss=metrics.loss)


def on_evaluate(run: RunView, evaluation: Evaluation) -> None:
    """Notes the loss; a GuardError ends the training on every rank, with exit code 5 and the checkpoints as they are."""
    _note(run, "evaluation", loss=evaluation.loss)
    best_step = run.progress.best_step
    if best_step is not None and run.progress.step - best_step >= PATIENCE_STEPS:
        raise GuardError(f"the validation loss has not fallen since step {best_step}; that checkpoint is the best")


def on_save(run: RunView, step: int, path: Path) -> None:
    """Notes the checkpoint and its size, and copies it. `path` holds the manifest; the tensors are in a folder beside it.

    Training waits for the copy. With `checkpoint.keep_last` of 2 or more, the checkpoint is not deleted before it is copied.
    """
    if run.is_main:
        files = checkpoint_files(path)
        _note(run, "checkpoint", of_step=step, bytes=sum(file.stat().st_size for file in files))
        if folder := os.environ.get("COPY_CHECKPOINTS_TO"):
            _copy(files, path.parent, Path(folder))


def on_train_end(run: RunView) -> None:
    """Notes the end."""
    _note(run, "end")


def _copy(files: list[Path], source: Path, target: Path) -> None:
    """The tensors first and the manifest last, each under another name until it is whole; tensors that are there already stay."""
    for file in files:
        copy = target / file.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            unfinished = copy.with_name(f"{copy.name}.part")
            shutil.copyfile(file, unfinished)
            unfinished.replace(copy)


def _note(run: RunView, event: str, **facts: Any) -> None:
    """Hooks are called on every rank; one of them writes."""
    if run.is_main:
        with (run.config.run / "diary.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "step": run.progress.step} | facts) + "\n")
