"""What the events of a run carry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.model.loss import perplexity
from trainer.run.progress import Progress

__all__ = [
    "RunFacts",
    "Sample",
    "SampleText",
    "ScoreTable",
    "StepFacts",
    "StepMetrics",
    "encodable",
    "numbers_in",
]


@dataclass(frozen=True)
class StepMetrics:
    """What is known after a step."""

    step: int
    last_step: int | None
    """The step at which the limits will end the run, if that is known."""
    loss: float
    grad_norm: float
    learning_rate: float
    targets: int
    """Targets trained on so far."""
    tokens_per_s: float
    """Targets of this step over its duration."""
    mfu: float | None
    """Share of the GPUs' peak rate that the model's arithmetic uses; None where the peak is not known."""
    loader_wait_s: float
    """Part of that duration spent waiting for data."""
    seconds: float | None = None
    """That duration; None where it was not measured."""
    loss_average: float | None = None
    """Mean of the finite losses of the last `log.average_steps` steps; None where there is none. The monitor fills it in."""
    monitor_s: float | None = None
    """Time that all sinks took for the numbers, readings, alerts and layers of the step before. The monitor fills it in."""
    non_finite_steps: int = 0
    """Steps of the run so far whose loss or gradient was not finite. The monitor fills it in."""

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, infinite where that overflows."""
        return perplexity(self.loss)

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def is_due(self, every_steps: int) -> bool:
        """Whether what is shown every so many steps shows this one: the first and the last always are."""
        return self.step % every_steps == 0 or self.step in (1, self.last_step)

    @property
    def loader_wait_share(self) -> float | None:
        """Share of the step's duration spent waiting for data, 0 to 1."""
        return self.loader_wait_s / self.seconds if self.seconds else None

    @property
    def monitor_share(self) -> float | None:
        """The monitor's time relative to the step's duration."""
        return self.monitor_s / self.seconds if self.seconds and self.monitor_s is not None else None


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step when it begins it."""

    progress: Progress
    """The counters after it."""
    learning_rate: float
    num_targets: int
    """Targets of this step."""
    loader_wait_s: float
    """How long the step waited for its data."""
    rows: NDArray[np.int64]
    """The rows of its global batch, in order."""


class SampleText(Protocol):
    """A text that the model wrote."""

    @property
    def prompt(self) -> str:
        """Its beginning, which was given."""

    @property
    def text(self) -> str:
        """What the model wrote after it."""


class ScoreTable(Protocol):
    """Scores of the samples of one evaluation, all together."""

    def to_json(self) -> Mapping[str, Any]:
        """By name."""


@dataclass(frozen=True)
class Sample:
    """The plainest `SampleText`."""

    prompt: str
    text: str


@dataclass(frozen=True)
class RunFacts:
    """What a sink should know of a run before its first event."""

    name: str
    """Of the run's directory."""
    settings: Mapping[str, Any]
    """All of them, nested by section."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The report of the prepared data; empty where it cannot be read."""


def encodable(text: str) -> str:
    """The text with a backslash and a number in place of each lone surrogate, which no UTF-8 can hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def numbers_in(scores: ScoreTable | None) -> dict[str, float]:
    """The scores that are numbers, by name."""
    values = {} if scores is None else scores.to_json()
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
