"""Training runs that are killed at any moment of reporting or saving, and the points that TensorBoard and the metrics then show."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as PlainReader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServedReader

from common.errors import ProjectError
from tests.support.disturbed import multiplied, spoiled
from tests.support.fork_server import forking
from tests.support.runs import metrics
from trainer import loop
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.metrics.monitor import Monitor
from trainer.metrics.run_status import RunStatus
from trainer.metrics.sinks import tensorboard
from trainer.training import step as micro_step

Trouble = Callable[[pytest.MonkeyPatch], None]
"""A disturbance that happens in every start of a run."""

_TOLD = ("train", "layers", "write", "samples", "saving", "alert", "rewind", "sync", "close")
_ALL = dict.fromkeys(("scalars", "images", "histograms", "tensors", "compressedHistograms", "audio"), 0)


def spike(patch: pytest.MonkeyPatch) -> None:
    """Multiply the loss of the tenth batch by ten."""
    spoiled(patch, lambda position: partial(multiplied, 10.0) if position == 9 else None)


def small_memory(patch: pytest.MonkeyPatch) -> None:
    """From step 7 on, let memory suffice for one row only."""
    seed, forward, current = micro_step.seed_micro_batch, micro_step.forward_pass, [0]

    def seeding(base: int, step: int, number: int, draw: int) -> None:
        current[0] = step
        seed(base, step, number, draw)

    def passing(module: Any, rows: Any, *arguments: Any, **settings: Any) -> Any:
        if current[0] >= 7 and len(rows.tokens) > 1 and module.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(module, rows, *arguments, **settings)

    patch.setattr(micro_step, "seed_micro_batch", seeding)
    patch.setattr(micro_step, "forward_pass", passing)


def stop_in_evaluation(patch: pytest.MonkeyPatch) -> None:
    """Send a stop signal while step 8 is evaluated."""
    evaluate = vars(loop)["evaluate"]

    def evaluating(run: Any, progress: Any) -> Any:
        if progress.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(run, progress)

    patch.setattr(loop, "evaluate", evaluating)


def keeping_points(patch: pytest.MonkeyPatch) -> None:
    """Broken variant: do not cut the files of TensorBoard at a resume."""
    patch.setattr(tensorboard, "cut_event_files", lambda *_: [])


def train_in_child(config: TrainConfig, troubles: tuple[Trouble, ...] = (), killed_at: int = 0) -> int:
    """Train in a child process, which SIGKILL ends at a moment. Moments are counted from 1; 0: the process is not killed.

    Returns:
        The number of moments, or -1 if the process was killed.
    """
    context = forking()
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(config, troubles, killed_at, sender))
    child.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError:
        return -1
    finally:
        child.join()


def _train(config: TrainConfig, troubles: tuple[Trouble, ...], killed_at: int, sender: Any) -> None:
    torch.set_num_threads(1)
    logging.disable()
    moments = 0

    def moment() -> None:
        nonlocal moments
        moments += 1
        if moments == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        for trouble in troubles:
            trouble(patch)
        for owner, names in ((Monitor, _TOLD), (CheckpointStore, ("save", "retain")), (RunStatus, ("end",))):
            for name in names:
                patch.setattr(owner, name, _between(moment, getattr(owner, name)))
        with contextlib.suppress(ProjectError):
            loop.train(config)
    sender.send(moments)
    sys.stdout.flush()


def _between(moment: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def between(*arguments: Any, **settings: Any) -> Any:
        moment()
        result = function(*arguments, **settings)
        moment()
        return result

    return between


def shown_by_tensorboard(run: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the points that each reader shows for each tag: the steps, or pairs of step and text."""
    plain = PlainReader(str(run / "tensorboard"), size_guidance=_ALL)
    served = ServedReader(
        str(run / "tensorboard"), tensor_size_guidance=dict.fromkeys(("scalars", "images", "text", "histograms"), 0)
    )
    plain.Reload()
    served.Reload()
    tags = plain.Tags()
    found: dict[str, list[Any]] = {tag: [_shown(point) for point in plain.Tensors(tag)] for tag in tags["tensors"]}
    for kind, read in (("scalars", plain.Scalars), ("images", plain.Images), ("histograms", plain.Histograms)):
        found |= {tag: [point.step for point in read(tag)] for tag in tags[kind]}
    return {"plain": found, "served": {tag: [_shown(point) for point in served.Tensors(tag)] for tag in served.Tags()["tensors"]}}


def _shown(point: Any) -> Any:
    texts = point.tensor_proto.string_val
    return (point.step, texts[0]) if len(texts) == 1 else point.step


def told(run: Path) -> list[tuple[Any, ...]]:
    """Return the events of the metrics in order, without times and measurements."""
    kinds = ("train", "eval", "sample", "scores", "layers", "alert", "save", "end")
    shown = ("event", "step", "loss_hex", "val_loss_hex", "text", "rule", "message", "status", "ended_by")
    return [tuple(event.get(name) for name in shown) for event in metrics(run, *kinds)]
