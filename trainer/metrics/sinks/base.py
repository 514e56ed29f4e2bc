"""The interface of a sink, and the facts about a run and its steps that sinks, extensions and the reporter share."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass as checked

from common.errors import ConfigError
from common.redaction import without
from common.settings.dotted import flatten
from common.settings.markers import FOLDER, Effect
from common.settings.model import is_among, settings_with
from trainer.config import TrainConfig
from trainer.metrics.layers import LayerReading
from trainer.runs.events import NOT_IN_FILE, Event, SampleEvent, ScoresEvent, TrainEvent
from trainer.runs.metrics_file import CutOff
from trainer.runs.state import Progress


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


class Sink:
    """Shows or stores the events of a run. A sink overrides the methods that it needs."""

    def begin(self, facts: RunFacts) -> None:
        """Take the facts about the run; called before all other methods."""

    def write(self, event: Event) -> None:
        """Take an event. An event `train` is a `StepMetrics`."""

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        """Take the samples of one evaluation and their scores."""
        for sample in samples:
            self.write(sample)
        if scores is not None:
            self.write(scores)

    def histograms(self, reading: LayerReading) -> None:
        """Take histograms of the layers, if the reading has any; they are no event."""

    def rewind(self, cut_off: CutOff) -> None:
        """Remove all events that the state does not cover to which the run goes back."""

    def sync(self) -> None:
        """Force all events to the device; called before a checkpoint that relies on them."""

    def close(self, status: str | None = None) -> None:
        """Close files and connections. `status`: how the run ended, `finished` or `stopped`; None if it failed."""


_log = logging.getLogger(__name__)


class ServiceSink(Sink):
    """A sink whose service may fail later: points are lost, the log says so once, and training goes on. `place`: its setting."""

    def __init__(self, place: str, every_steps: int) -> None:
        self._place = place
        self._every_steps = every_steps
        self._secrets: Sequence[str] = ()  # texts that are removed from an error of the service before it is shown
        self._reachable = True

    def write(self, event: Event) -> None:
        """Add a point to each curve of the event. A step adds points if it is due or was not finite."""
        if not isinstance(event, StepMetrics) or event.is_due(self._every_steps) or not event.is_finite:
            self._add(event.step, event.points())

    def _add(self, step: int, points: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            if self._reachable:
                _log.warning("%s: points are lost (%s); training continues", self._place, without(str(error), self._secrets))
            self._reachable = False


def imported(package: str, setting: str, distribution: str) -> Any:
    """Return an optional package. Raises ConfigError with the command that installs it if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{setting} needs the package {package}, which is not installed; install it with `pip install --no-deps "
            f"--require-hashes -r env/requirements-tracking.lock` or `pip install {distribution}`, or leave {setting} out"
        ) from None


def hyper_parameters(settings: Mapping[str, Any]) -> dict[str, str | float]:
    left_out = settings_with(TrainConfig, Effect.NONE, FOLDER)
    flat: dict[str, str | float] = {}
    for name, value in flatten(settings).items():
        if not is_among(name, left_out):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            flat[name] = value if is_number else "none" if value is None else str(value)
    return flat
