"""Disturbs training runs in this process: stops or kills them at a step, or changes their loss. Also reads what such a run did.

Each disturbance replaces a named function of the trainer. The settings and the identity of the run do not change.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.errors import ProjectError
from tests.support.runs import metrics
from trainer import loop
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.data.batch import IGNORE
from trainer.extensions.hooks import Extension
from trainer.runs.layout import LEDGER

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Killed(BaseException):
    """Ends a run as abruptly as possible within one process: nothing is saved and nothing is cleaned up."""


def after_steps(patch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Call `action` after `number` steps have been made and reported. Repeated steps count. 0: before the first step."""
    notify = Extension.notify
    seen: list[int] = []

    def noted(extension: Extension, name: str, run: Any, *arguments: Any) -> Any:
        logged = notify(extension, name, run, *arguments)
        if name == "on_step_end":
            seen.append(arguments[0].step)
        if (name == "on_step_end" and len(seen) == number) or (name == "on_train_start" and number == 0):
            action()
        return logged

    patch.setattr(Extension, "notify", noted)


def stop(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let a stop signal end the run after its `number`-th step, with the state saved. Repeated steps count."""
    after_steps(patch, number - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))


def kill(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let the run end without cleanup after its `number`-th step. A save that has started is completed."""

    def die() -> None:
        raise Killed

    after_steps(patch, number, die)


def multiplied(factor: float, logits_BLV: Tensor, targets_BL: Tensor, _weights: Tensor | None) -> Tensor:
    """Return the plain cross-entropy sum times a factor."""
    loss = cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss * factor


def spoiled(patch: pytest.MonkeyPatch, loss_at: Callable[[int], LossFunction | None]) -> None:
    """Train on the loss that `loss_at` returns for the index of a batch, counted from 0. None keeps the configured loss."""
    step = vars(loop)["train_step"]

    def stepping(training: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
        own = training.loss.custom_loss
        training.loss.custom_loss = loss_at(batch.start // training.context.config.batch.global_batch_size) or own
        try:
            return step(training, batch, *arguments, **settings)
        finally:
            training.loss.custom_loss = own

    patch.setattr(loop, "train_step", stepping)


def trained(config: TrainConfig) -> str:
    """Return the result of `train`, or the error with which it ends, as text."""
    try:
        return loop.train(config)
    except (ProjectError, Killed) as error:
        return f"{type(error).__name__}: {error}"


def outcome(run: Path, result: str) -> dict[str, Any]:
    """Return all results that a run has recorded, bit for bit, without times and paths."""
    steps = metrics(run, "train")
    return {
        "result": result.replace(str(run), "RUN"),
        "losses": [(event["step"], event["loss_hex"]) for event in steps],
        "gradient norms": [float(event["grad_norm"]).hex() for event in steps],
        "learning rates": [float(event["lr"]).hex() for event in steps],
        "targets": [event["tokens"] for event in steps],
        "validation": [(event["step"], event["val_loss_hex"]) for event in metrics(run, "eval")],
        "alerts": [(event["step"], event["message"]) for event in metrics(run, "alert")],
        "saves": [event["step"] for event in metrics(run, "save")],
        "checkpoints": CheckpointStore(run / "checkpoints").steps(),
        "evaluations": evaluations(run),
        "ledger": (run / LEDGER).read_text().splitlines(),
    }


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the evaluations in the newest checkpoint, by which convergence is judged. Empty without a checkpoint."""
    store = CheckpointStore(run / "checkpoints")
    return list(store.load(max(store.steps())).state["progress"]["evaluations"]) if store.steps() else []


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of the entries that differ."""
    return [name for name in expected if found[name] != expected[name]]


def parameters_are_finite(run: Path) -> bool:
    """Return whether all numbers in all tensors of all checkpoints are finite."""
    store = CheckpointStore(run / "checkpoints")
    return all(
        bool(torch.isfinite(tensor).all())
        for step in store.steps()
        for group in (store.load(step).model, store.load(step).optimizer)
        for tensor in group.values()
    )
