"""Called by the training: keeps a diary of the run, and stops it when the validation loss no longer falls.

    python -m trainer train --extension examples/callbacks.py ...

The diary is `diary.jsonl` in the run directory, one object a line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_pipeline.errors import GuardError
from trainer.evaluate import Evaluation
from trainer.extension import RunView
from trainer.metrics import StepMetrics

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
    """Notes the checkpoint and its size. This is also the place to copy it elsewhere."""
    if run.is_main:
        _note(run, "checkpoint", of_step=step, bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def on_train_end(run: RunView) -> None:
    """Notes the end."""
    _note(run, "end")


def _note(run: RunView, event: str, **facts: Any) -> None:
    """Hooks are called on every rank; one of them writes."""
    if run.is_main:
        with (run.config.run / "diary.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "step": run.progress.step} | facts) + "\n")
