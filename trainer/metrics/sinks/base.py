"""The interface of a sink. A sink overrides the methods that it needs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from common.redaction import without
from common.settings.dotted import flatten
from common.settings.markers import Effect, Marker
from common.settings.model import is_among, settings_with
from trainer.config import TrainConfig
from trainer.metrics.layers import LayerReading
from trainer.metrics.step_metrics import RunFacts, StepMetrics
from trainer.runs.events import Event, SampleEvent, ScoresEvent
from trainer.runs.metrics_file import CutOff


class Sink:
    """Shows or stores the events of a run."""

    def begin(self, facts: RunFacts) -> None:
        """Take the facts about the run; called before all other methods."""

    def model(self, graph: bytes) -> None:
        """Take the graph of the model, a serialised `GraphDef`."""

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

    def finish(self, status: str) -> None:
        """Take how the run ended: `finished` or `stopped`; not called if it failed."""

    def close(self) -> None:
        """Close files and connections."""


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
    left_out = settings_with(TrainConfig, Effect.NONE, Marker.FOLDER)
    flat: dict[str, str | float] = {}
    for name, value in flatten(settings).items():
        if not is_among(name, left_out):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            flat[name] = value if is_number else "none" if value is None else str(value)
    return flat
