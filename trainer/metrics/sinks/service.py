"""What the sinks have in common that send a run's numbers to a service: the same curves, and a service that may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.redaction import without
from trainer.evaluation.results import Evaluation
from trainer.machine.sampler import HardwareReading
from trainer.metrics.layers import LayerReading
from trainer.metrics.sinks.base import Sink
from trainer.metrics.sinks.points import evaluation_points, hardware_points, layer_points, saving_points, train_points
from trainer.metrics.step_metrics import StepMetrics

__all__ = ["ServiceSink"]

_log = logging.getLogger(__name__)


class ServiceSink(Sink):
    """A sink whose service may fail once the run has begun: points are lost, the log says so once, and training goes on.

    Args:
        place: the setting that names the service, for the log.
        every_steps: steps between the points of a curve.
    """

    def __init__(self, place: str, every_steps: int) -> None:
        self._place = place
        self._every_steps = every_steps
        self._secrets: Sequence[str] = ()
        """What must not be shown of an error of the service."""
        self._reachable = True

    def train(self, metrics: StepMetrics) -> None:
        """Adds a point to each training curve, if this step is due or was not finite."""
        if metrics.is_due(self._every_steps) or not metrics.is_finite:
            self._add(metrics.step, train_points(metrics))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Adds a point to each validation curve."""
        self._add(step, evaluation_points(evaluation))

    def layers(self, reading: LayerReading) -> None:
        """Adds points for each layer."""
        self._add(reading.step, layer_points(reading))

    def hardware(self, step: int, reading: HardwareReading, memory_trend: float | None) -> None:
        """Adds a point to each curve of the machine."""
        self._add(step, hardware_points(reading, memory_trend))

    def saving(self, step: int, stall_s: float) -> None:
        """Adds a point to the curve of the stalls."""
        self._add(step, saving_points(stall_s))

    def _add(self, step: int, points: Mapping[str, Any]) -> None:
        """Sends points, if there are any."""
        raise NotImplementedError

    def _attempt(self, action: Callable[[], object]) -> None:
        """Does it, and does not mind where it cannot be done."""
        try:
            action()
        except Exception as error:
            if self._reachable:
                _log.warning("%s: points are lost (%s); training goes on", self._place, without(str(error), self._secrets))
            self._reachable = False
