"""The facts about a run and its steps that sinks, extensions and the reporter share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass as checked

from trainer.runs.events import NOT_IN_FILE, TrainEvent
from trainer.runs.progress import Progress


@checked(frozen=True, kw_only=True)
class StepMetrics(TrainEvent):
    """The event `train` of a step that was just made, with facts that are not in the file."""

    if TYPE_CHECKING:  # only a file may lack these numbers
        learning_rate: float
        targets: int
        tokens_per_s: float
        loader_wait_s: float
    last_step: Annotated[int | None, NOT_IN_FILE]
    """The step at which the limits will end the run, if that is known."""
    run_s: Annotated[float, NOT_IN_FILE] = 0.0
    """Time of the run so far, over all starts."""
    left_s: Annotated[float | None, NOT_IN_FILE] = None
    """Expected time until a limit ends the run, if that is known."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def is_due(self, every_steps: int) -> bool:
        """Return whether a sink that shows every so many steps shows this one; it always shows the first and the last."""
        return self.step % every_steps == 0 or self.step in (1, self.last_step)


class LearningRates(NamedTuple):
    # before they are scaled for the width of the model
    adamw: float
    muon: float | None


@dataclass(frozen=True)
class StepFacts:
    progress: Progress  # the counters after the step
    rates: LearningRates
    num_targets: int
    loader_wait_s: float  # time that the step waited for its data
    rows: NDArray[np.int64]  # the rows of its global batch, in order


@dataclass(frozen=True)
class RunFacts:
    name: str
    settings: Mapping[str, Any]
    report: Mapping[str, Any] = field(default_factory=dict)  # the report of the prepared data; empty if it cannot be read
