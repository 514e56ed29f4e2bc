from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.errors import CheckpointError
from common.untrusted import Count, Finite, Schema, parsed
from trainer.runs.metrics_file import CutOff
from trainer.runs.progress import LedgerHead, Progress


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
