"""The content of a checkpoint besides tensors. Saves, resumes and rollbacks read and write it through `RunState` alone.

`copy_state` copies a checkpoint with all that a resume needs into another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from common.errors import CheckpointError
from common.untrusted import Count, Finite, Form, check_form, copy_run_file, read_run_file
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.checkpoint.manifest import MAX_MANIFEST_BYTES, parse_manifest
from trainer.checkpoint.packed import is_packed, num_unpacked, unpack
from trainer.runs.bounds import check_fits_memory
from trainer.runs.directory import REFERENCE
from trainer.runs.ledger import LEDGER, LedgerHead
from trainer.runs.metrics_file import METRICS, CutOff
from trainer.runs.progress import Progress
from trainer.runs.record import COMPRESSED, read_record

__all__ = ["RunState", "copy_state", "load_checkpoint", "load_whole", "read_progress"]


@dataclass(frozen=True)
class RunState:
    """Counters, loss scaler, guard, training losses and ledger at one step."""

    progress: Progress
    scaler: Mapping[str, Any]
    """State of the loss scaler in fp16; empty in other precisions."""
    guard: Mapping[str, Any]
    train_losses: Mapping[str, float]
    """The training losses since the last evaluation."""
    ledger: LedgerHead | None
    """Only rank 0 has a ledger."""

    @property
    def known(self) -> CutOff:
        evaluated = self.progress.evaluated_step == self.progress.step
        return CutOff(self.progress.step, evaluated=evaluated, rollbacks=self.guard["rollbacks"])

    @staticmethod
    def of_new_run() -> RunState:
        guard = {"steps": [], "losses": [], "level_since": 0, "streaks": {}, "skips_in_row": 0, "rollbacks": 0}
        guard["tail"] = {"steps": [], "excesses": [], "noises": [], "climbs": []}
        return RunState(Progress(), {}, guard, {"total": 0.0, "steps": 0}, LedgerHead())

    def to_json(self) -> dict[str, Any]:
        """Return plain values; floats survive JSON exactly."""
        return {
            "progress": self.progress.to_json(),
            "scaler": dict(self.scaler),
            "guard": dict(self.guard),
            "train_losses": dict(self.train_losses),
            "ledger": None if self.ledger is None else self.ledger.to_json(),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RunState:
        """Return the state with the values of `to_json`.

        Raises:
            ValueError: a field is missing, or has another type or range; the message names it.
        """
        check_form(_StateForm, values)
        guard = values["guard"]
        if len(guard["steps"]) != len(guard["losses"]):
            raise ValueError("guard.steps and guard.losses differ in length")
        return RunState(
            progress=Progress.from_json(values["progress"]),
            scaler=values["scaler"],
            guard=guard,
            train_losses=values["train_losses"],
            ledger=LedgerHead(**values["ledger"]),
        )


def load_whole(store: CheckpointStore, step: int) -> tuple[Checkpoint, RunState]:
    """Return the checkpoint of a step and its state.

    Raises:
        CheckpointError: there is none, a file of it was changed, or no run writes such a state.
    """
    checkpoint = store.load(step)
    try:
        return checkpoint, RunState.from_json(checkpoint.state)
    except ValueError as error:
        raise CheckpointError(f"{store.manifest_path(step)}: {error}; choose another checkpoint") from None


def load_checkpoint(run: Path, which: str, *, option: str = "--checkpoint") -> Checkpoint:
    """Return the verified checkpoint of a run that `which` names: `latest`, `best` or a step.

    Args:
        run: its directory, which is only read.
        which: value of the option.
        option: its name, for messages.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    store = CheckpointStore(run / "checkpoints")
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{run}: the run has no checkpoint yet; train until the first one is saved")
    if which not in ("latest", "best") and not which.isdecimal():
        raise CheckpointError(f"{option} {which}: use latest, best, or one of the steps {', '.join(map(str, steps))}")
    if which.isdecimal():
        return _unpacked(run, load_whole(store, int(which))[0])
    latest, state = load_whole(store, steps[-1])
    best = state.progress.best_step
    return _unpacked(run, latest if which == "latest" or best is None else load_whole(store, best)[0])


def _unpacked(run: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with ordinary tensors if it is that of a compressed model."""
    if not is_packed(checkpoint.model) or read_record(run).status != COMPRESSED:
        return checkpoint
    try:
        check_fits_memory(num_unpacked(checkpoint.model))  # a small file may hold a large matrix of zeros
        return replace(checkpoint, model=unpack(checkpoint.model))
    except ValueError as error:
        raise CheckpointError(f"{run}: a weight of the compressed model is damaged: {error}; compress the run again") from None


def read_progress(store: CheckpointStore, step: int) -> Progress:
    """Return the counters in the checkpoint of a step. The tensors are not read.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    path = store.manifest_path(step)
    try:
        state = parse_manifest(read_run_file(path, MAX_MANIFEST_BYTES, path.parent)).state
        check_form(_StateForm, state)
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; choose another checkpoint") from None
    return Progress.from_json(state["progress"])


def copy_state(run: Path, other: Path, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint of `run` into a new run directory, with the ledger and metrics before it. A resume removes later lines.

    Raises:
        CheckpointError: the ledger or the metrics are missing.
    """
    (other / LEDGER).parent.mkdir(parents=True, exist_ok=True)
    kept = [REFERENCE] if (run / REFERENCE).is_file() else []
    if kept:
        (other / REFERENCE).parent.mkdir(exist_ok=True)
    for name in (METRICS, LEDGER.as_posix(), *kept):
        copy_run_file(run, name, other / name)
    CheckpointStore(other / "checkpoints").save(checkpoint)


class _EvaluatedForm(Form, extra="forbid"):
    step: Count
    val_loss: Finite | None
    train_loss: Finite | None


class _ProgressForm(Form, extra="forbid"):
    step: Count = 0
    rows: Count = 0
    targets: Count = 0
    seconds: Annotated[Finite, Field(ge=0)] = 0.0
    ending_s: Annotated[Finite, Field(ge=0)] = 0.0
    evaluated_step: Annotated[int, Field(ge=-1)] = -1
    saved_seconds: Annotated[Finite, Field(ge=0)] = 0.0
    best_step: Count | None = None
    best_val_loss: Finite | None = None
    evaluations: list[_EvaluatedForm]
    left_out: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]


class _GuardForm(Form):
    steps: list[Count]
    losses: list[Finite]
    level_since: Count
    streaks: dict[str, Count]
    skips_in_row: Count
    rollbacks: Count


class _LossesForm(Form, extra="forbid"):
    total: Finite
    steps: Count


class _LedgerForm(Form, extra="forbid"):
    step: Count
    lines: Count
    chain: str


class _StateForm(Form):
    progress: _ProgressForm
    guard: _GuardForm
    train_losses: _LossesForm
    ledger: _LedgerForm
    scaler: dict[str, Annotated[Finite, Field(ge=0)]]
