"""Disturbs trainings in this process: stops and kills them at a step, spoils their losses; and says what came of them.

Everything is done through the trainer's named places, so that the run's settings and its identity stay what they are.
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
from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig
from trainer.data.batch import IGNORE
from trainer.extensions.hooks import Extension
from trainer.run.ledger import LEDGER

__all__ = [
    "Killed",
    "after_steps",
    "differences",
    "kill",
    "multiplied",
    "outcome",
    "parameters_are_finite",
    "spoiled",
    "stop",
    "trained",
]

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Killed(BaseException):
    """As abrupt as it gets within one process: nothing is saved and nothing is tidied."""


def after_steps(patch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Calls `action` once so many steps have been made and reported, repeated ones included; 0: before the first."""
    start, step_end = Extension.train_start, Extension.step_end
    seen: list[int] = []

    def started(extension: Extension, run: Any) -> None:
        start(extension, run)
        if number == 0:
            action()

    def ended(extension: Extension, run: Any, step_metrics: Any) -> None:
        step_end(extension, run, step_metrics)
        seen.append(step_metrics.step)
        if len(seen) == number:
            action()

    patch.setattr(Extension, "train_start", started)
    patch.setattr(Extension, "step_end", ended)


def stop(patch: pytest.MonkeyPatch, number: int) -> None:
    """Has a signal end the run, saved, with its `number`-th step, counted as it makes them."""
    after_steps(patch, number - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))


def kill(patch: pytest.MonkeyPatch, number: int) -> None:
    """Has the run end without a word after its `number`-th step; a save that is running is completed."""

    def die() -> None:
        raise Killed

    after_steps(patch, number, die)


def multiplied(factor: float, logits_BLV: Tensor, targets_BL: Tensor, _weights: Tensor | None) -> Tensor:
    """The plain cross-entropy sum times a factor."""
    loss = cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss * factor


def spoiled(patch: pytest.MonkeyPatch, loss_at: Callable[[int], LossFunction | None]) -> None:
    """Trains on another loss where `loss_at` gives one for the position of a batch, counted in batches from 0."""
    step = vars(loop)["train_step"]

    def stepping(training: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
        own = training.loss.own_loss
        training.loss.own_loss = loss_at(batch.start // training.context.config.batch.global_rows) or own
        try:
            return step(training, batch, *arguments, **settings)
        finally:
            training.loss.own_loss = own

    patch.setattr(loop, "train_step", stepping)


def trained(config: TrainConfig) -> str:
    """What `train` returns, or the error with which it ends."""
    try:
        return loop.train(config)
    except (ProjectError, Killed) as error:
        return f"{type(error).__name__}: {error}"


def outcome(run: Path, result: str) -> dict[str, Any]:
    """All that a run shows of what it did, bit for bit, without times and paths."""
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
    """By which convergence is judged, as the newest checkpoint has them; none without a checkpoint."""
    store = CheckpointStore(run / "checkpoints")
    return list(store.load(max(store.steps())).state["progress"]["evaluations"]) if store.steps() else []


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    return [name for name in expected if found[name] != expected[name]]


def parameters_are_finite(run: Path) -> bool:
    """True where no tensor of any checkpoint has a number that is not finite."""
    store = CheckpointStore(run / "checkpoints")
    return all(
        bool(torch.isfinite(tensor).all())
        for step in store.steps()
        for group in (store.load(step).model, store.load(step).optimizer)
        for tensor in group.values()
    )
