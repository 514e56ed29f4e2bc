"""How far a run has come: its counters and its place in the ledger."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from common.untrusted import Count, Finite

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
