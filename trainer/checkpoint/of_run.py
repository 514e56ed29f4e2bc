"""Checkpoints of runs: with their state, as a command names them, and copied into another run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError, GuardError
from common.hardware import check_fits_memory
from common.untrusted import copy_run_file
from trainer.checkpoint.packed import is_packed, num_unpacked, unpack
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.runs.layout import LEDGER, METRICS, REFERENCE
from trainer.runs.record import COMPRESSED
from trainer.runs.saved_run import SavedRun
from trainer.runs.state import RunState


def load_whole(store: CheckpointStore, step: int) -> tuple[Checkpoint, RunState]:
    checkpoint = store.load(step)
    return checkpoint, RunState.of_manifest(store.manifest_path(step), checkpoint.state)


def load_checkpoint(run: SavedRun, which: str, *, option: str = "--checkpoint") -> Checkpoint:
    """Return the verified checkpoint that `which` names: `latest`, `best` or a step. `option` is for messages."""
    store = CheckpointStore.of(run.path)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{run.path}: the run has no checkpoint yet; train until the first one is saved")
    if which not in ("latest", "best") and not which.isdecimal():
        raise CheckpointError(f"{option} {which}: use latest, best, or one of the steps {', '.join(map(str, steps))}")
    if which.isdecimal():
        return _unpacked(run, load_whole(store, int(which))[0])
    latest, state = load_whole(store, steps[-1])
    best = state.progress.best_step
    return _unpacked(run, latest if which == "latest" or best is None else load_whole(store, best)[0])


def _unpacked(run: SavedRun, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with ordinary tensors if it is that of a compressed model."""
    if not is_packed(checkpoint.model) or run.record.status != COMPRESSED:
        return checkpoint
    try:
        check_fits_memory(num_unpacked(checkpoint.model))  # a small file may hold a large matrix of zeros
        return replace(checkpoint, model=unpack(checkpoint.model))
    except ValueError as error:
        raise CheckpointError(f"{run.path}: a weight of the compressed model is damaged: {error}; compress the run again") from None


def copy_state(run: Path, other: Path, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint of `run` into a new run directory, with the ledger and metrics before it. A resume removes later lines."""
    (other / LEDGER).parent.mkdir(parents=True, exist_ok=True)
    kept = [REFERENCE] if (run / REFERENCE).is_file() else []
    if kept:
        (other / REFERENCE).parent.mkdir(exist_ok=True)
    for name in (METRICS, LEDGER.as_posix(), *kept):
        copy_run_file(run, name, other / name)
    CheckpointStore.of(other).save(checkpoint)


def averaged_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights that evaluations use: the moving average of those that have one, and all others as they are."""
    return {**checkpoint.model, **checkpoint.average}


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 over all weights, sorted by name, as little-endian fp32."""
    digest = hashlib.sha256()
    for _, weight in sorted(weights.items()):
        digest.update(weight.detach().cpu().float().numpy().astype("<f4", copy=False).tobytes())
    return f"sha256:{digest.hexdigest()}"


def check_finite(checkpoint: Checkpoint) -> None:
    """Refuse to save weights that are not finite, because training cannot continue from them."""
    for name, weight in checkpoint.model.items():
        if not _is_finite(weight):
            raise GuardError(
                f"step {checkpoint.step}: weight {name} is not finite, so nothing is saved; the last checkpoint is intact. Lower "
                "optim.lr, or look for code other than the optimizer that changes weights"
            )


def _is_finite(weight: Tensor) -> bool:
    # With NumPy, which uses one thread: training needs the others meanwhile. A NaN is both the least and the largest value.
    values = (weight if weight.dtype in (torch.float32, torch.float64) else weight.float()).detach().numpy()
    return math.isfinite(values.min(initial=0)) and math.isfinite(values.max(initial=0))
