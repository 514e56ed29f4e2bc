"""A request to stop, by SIGTERM or SIGINT: noted at once, acted on between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stop_request"]


class StopRequest:
    """The name of the signal that asked for a stop, if one has."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler; further signals change nothing, as the stop is under way."""
        self.signal_name = self.signal_name or signal.Signals(number).name


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Catches SIGTERM and SIGINT while the context lasts, and puts back the handlers that were there."""
    request = StopRequest()
    previous = {number: signal.signal(number, request.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
