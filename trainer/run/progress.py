"""How far a run has come. Together with weights and optimizer it is all that a resume needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Evaluated", "Progress"]


@dataclass(frozen=True)
class Evaluated:
    """What is kept of one evaluation."""

    step: int
    val_loss: float | None
    """In nats; none where it was no number."""
    train_loss: float | None
    """Mean of the training losses since the evaluation before; none where there is none."""


@dataclass(frozen=True)
class Progress:
    """Counters of a run; the position in the data is `rows`, and nothing else."""

    step: int = 0
    """Optimizer steps done."""
    rows: int = 0
    """Position in the order: rows committed by those steps, over all ranks, and rows left out. What was only read ahead does not
    count."""
    targets: int = 0
    """Targets in those rows."""
    seconds: float = 0.0
    """Training time of rank 0, over all resumes."""
    evaluated_step: int = -1
    """Step of the last evaluation."""
    saved_seconds: float = 0.0
    """`seconds` at the last checkpoint."""
    best_step: int | None = None
    """Step of the lowest validation loss so far; none before one is a number."""
    best_val_loss: float | None = None
    """That loss, in nats per target."""
    evaluations: tuple[Evaluated, ...] = ()
    """All evaluations so far, by which convergence is judged."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Positions that are never trained on, as first and end, because of a rollback."""

    def after_step(self, *, end: int, targets: int) -> Progress:
        """The counters once a step has used the rows up to the position `end`, with `targets` targets."""
        return replace(self, step=self.step + 1, rows=end, targets=self.targets + targets)

    def before_step(self, *, start: int, targets: int) -> Progress:
        """The counters from which the last step can be made again: its rows begin at `start` and have `targets` targets."""
        return replace(self, step=self.step - 1, rows=start, targets=self.targets - targets)

    def leaving_out(self, first: int, end: int) -> Progress:
        """The counters of a run that passes over these positions."""
        return replace(self, left_out=(*self.left_out, (first, end)))

    def at(self, seconds: float) -> Progress:
        """The counters with the training time that all ranks agreed on."""
        return replace(self, seconds=seconds)

    def after_evaluation(self, val_loss: float, train_loss: float | None = None) -> Progress:
        """The counters once this step has been evaluated; `train_loss` is the mean since the evaluation before."""
        better = self.step > 0 and math.isfinite(val_loss) and (self.best_val_loss is None or val_loss < self.best_val_loss)
        known = Evaluated(self.step, val_loss if math.isfinite(val_loss) else None, train_loss)
        evaluated = replace(self, evaluated_step=self.step, evaluations=(*self.evaluations, known))
        return replace(evaluated, best_step=self.step, best_val_loss=val_loss) if better else evaluated

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Progress:
        """What `to_json` gave."""
        left_out = tuple((first, end) for first, end in values["left_out"])
        evaluations = tuple(Evaluated(**known) for known in values["evaluations"])
        return Progress(**{**values, "left_out": left_out, "evaluations": evaluations})

    def to_json(self) -> dict[str, Any]:
        """Plain values; floats survive JSON exactly."""
        return asdict(self)
