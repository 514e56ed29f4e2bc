"""Common part of the sinks that send a run's numbers to a service, which may fail."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from common.redaction import without
from trainer.metrics.sinks.base import Sink
from trainer.metrics.step_metrics import StepMetrics
from trainer.runs.events import Event

__all__ = ["ServiceSink", "imported"]

_log = logging.getLogger(__name__)


class ServiceSink(Sink):
    """A sink whose service may fail after the run has begun: points are lost, the log says so once, and training goes on.

    Args:
        place: the setting that names the service, for the log.
        every_steps: steps between the points of a curve.
    """

    def __init__(self, place: str, every_steps: int) -> None:
        self._place = place
        self._every_steps = every_steps
        self._secrets: Sequence[str] = ()
        """Texts that are removed from an error of the service before it is shown."""
        self._reachable = True

    def write(self, event: Event) -> None:
        """Add a point to each curve of the event. A step adds points if it is due or was not finite."""
        if not isinstance(event, StepMetrics) or event.is_due(self._every_steps) or not event.is_finite:
            self._add(event.step, event.points())

    def _add(self, step: int, points: Mapping[str, Any]) -> None:
        """Send points, if there are any."""
        raise NotImplementedError

    def _attempt(self, action: Callable[[], object]) -> None:
        """Call a function of the service. If it fails, the log says so once."""
        try:
            action()
        except Exception as error:
            if self._reachable:
                _log.warning("%s: points are lost (%s); training continues", self._place, without(str(error), self._secrets))
            self._reachable = False


def imported(package: str, setting: str, distribution: str) -> Any:
    """Return an optional package.

    Raises:
        ConfigError: it is not installed; the message names the command that installs `distribution`.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{setting} needs the package {package}, which is not installed; install it with `pip install --no-deps "
            f"--require-hashes -r env/requirements-tracking.lock` or `pip install {distribution}`, or leave {setting} out"
        ) from None
