"""The state of a run in a checkpoint: its counters, its place in the ledger, and the numbers of the guard."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from common.errors import CheckpointError
from common.untrusted import Count, Finite, Schema, parsed
from trainer.runs.metrics_file import CutOff

_Seconds = Annotated[Finite, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Evaluated:
    step: Count
    val_loss: Finite | None  # in nats; None if it was not finite
    train_loss: Finite | None  # mean of the training losses since the evaluation before; None if there are none


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Progress:
    """Counters of a run; `rows` alone is the position in the data."""

    step: Count = 0
    """Optimizer steps done."""
    rows: Count = 0
    """Position in the order: rows that those steps have used on all ranks, and rows left out. Rows that were only read ahead do
    not count."""
    targets: Count = 0
    """Targets in those rows."""
    seconds: _Seconds = 0.0
    """Time of rank 0 since the run began, with evaluations and saves, over all resumes."""
    ending_s: _Seconds = 0.0
    """`Clock.ending_s` of rank 0."""
    evaluated_step: Annotated[int, Field(ge=-1, strict=True)] = -1
    """Step of the last evaluation."""
    saved_seconds: _Seconds = 0.0
    """`seconds` at the last checkpoint."""
    best_step: Count | None = None
    """Step of the lowest validation loss so far; None before the first finite one."""
    best_val_loss: Finite | None = None
    """The validation loss at `best_step`, in nats per target."""
    evaluations: tuple[Evaluated, ...] = ()
    """All evaluations so far, for the judgement of convergence."""
    left_out: tuple[tuple[Count, Count], ...] = ()
    """Positions that are never trained on because of a rollback: the first, and the one after the last."""

    def after_step(self, *, end: int, targets: int) -> Progress:
        """Return the counters after a step that used the rows up to the position `end`, with `targets` targets."""
        return replace(self, step=self.step + 1, rows=end, targets=self.targets + targets)

    def before_step(self, *, start: int, targets: int) -> Progress:
        """Return the counters before the last step, whose rows begin at `start` and have `targets` targets."""
        return replace(self, step=self.step - 1, rows=start, targets=self.targets - targets)

    def leaving_out(self, first: int, end: int) -> Progress:
        """Return the counters of a run that leaves out the positions from `first` to before `end`."""
        return replace(self, left_out=(*self.left_out, (first, end)))

    def at(self, seconds: float, ending_s: float = 0.0) -> Progress:
        return replace(self, seconds=seconds, ending_s=ending_s)

    def after_evaluation(self, val_loss: float, train_loss: float | None = None) -> Progress:
        """Return the counters after an evaluation of this step; `train_loss` is the mean since the evaluation before."""
        better = self.step > 0 and math.isfinite(val_loss) and (self.best_val_loss is None or val_loss < self.best_val_loss)
        known = Evaluated(self.step, val_loss if math.isfinite(val_loss) else None, train_loss)
        evaluated = replace(self, evaluated_step=self.step, evaluations=(*self.evaluations, known))
        return replace(evaluated, best_step=self.step, best_val_loss=val_loss) if better else evaluated


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LedgerHead:
    """A place in the ledger. A checkpoint holds one."""

    step: Count = 0  # the last step up to this place
    lines: Count = 0
    chain: Annotated[str, Field(strict=True)] = hashlib.sha256(b"ledger/1").hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ExcessRows(Schema):
    """The rows of `trainer.health.guard.Excesses`, by column."""

    steps: list[Count]
    excesses: list[Finite]
    climbs: list[Finite]
    noises: list[Finite]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len({len(column) for column in (self.steps, self.excesses, self.climbs, self.noises)}) > 1:
            raise ValueError("the columns of guard.tail differ in length")
        return self


class GuardState(Schema):
    steps: list[Count]
    losses: list[Finite]
    level_since: Count
    streaks: dict[str, Count]
    skips_in_row: Count
    rollbacks: Count
    tail: ExcessRows | None = None  # earlier versions did not save it

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.steps) != len(self.losses):
            raise ValueError("guard.steps and guard.losses differ in length")
        return self


class LossSums(Schema, extra="forbid"):
    total: Finite
    steps: Count


@dataclass(frozen=True)
class RunState:
    progress: Progress
    scaler: dict[str, Count | Annotated[Finite, Field(ge=0)]]  # torch needs its counters as integers
    """State of the loss scaler in fp16; empty in other precisions."""
    guard: GuardState
    train_losses: LossSums
    ledger: LedgerHead | None  # only rank 0 has a ledger

    @property
    def known(self) -> CutOff:
        evaluated = self.progress.evaluated_step == self.progress.step
        return CutOff(self.progress.step, evaluated=evaluated, rollbacks=self.guard.rollbacks)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; floats survive JSON exactly."""
        return {
            "progress": asdict(self.progress),
            "scaler": self.scaler,
            "guard": self.guard.to_json(),
            "train_losses": self.train_losses.to_json(),
            "ledger": None if self.ledger is None else asdict(self.ledger),
        }

    @staticmethod
    def from_json(values: object) -> RunState:
        """Raises ValueError, which names the field, for values that `to_json` does not return."""
        state = parsed(RunState, values)
        if state.ledger is None:
            raise ValueError("ledger = None: a checkpoint has a place in the ledger")
        return state

    @staticmethod
    def of_manifest(path: Path, values: object) -> RunState:
        """Return the state in the manifest at `path`. CheckpointError: no run writes such a state."""
        try:
            return RunState.from_json(values)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; restore it from a copy, or choose another checkpoint") from None
