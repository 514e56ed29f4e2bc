"""What the sinks have in common that send a run's numbers to a service."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trainer.metrics.sink import Sink

__all__ = ["ServiceSink"]

_log = logging.getLogger(__name__)


class ServiceSink(Sink):
    """A sink whose service may fail once the run has begun: points are lost, the log says so once, and training goes on.

    Args:
        place: the setting that names the service, for the log.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._reachable = True

    def _attempt(self, action: Callable[[], object]) -> None:
        """Does it, and does not mind where it cannot be done."""
        try:
            action()
        except Exception as error:
            if self._reachable:
                _log.warning("%s: points are lost (%s); training goes on", self._place, error)
            self._reachable = False
