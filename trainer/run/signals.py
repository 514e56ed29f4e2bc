"""A request to stop, by SIGTERM or SIGINT: noted at once, acted on between two steps.

Under `trainer.launch.agent` a rank is born with both blocked, and has them blocked again at its end: a signal that comes while it
loads waits for `stop_request`, and one that comes after the last save is ignored.
"""

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
    """Catches SIGTERM and SIGINT while the context lasts, also where they were blocked; what was blocked is ignored after it."""
    request = StopRequest()
    previous = {number: signal.signal(number, request.note) for number in (signal.SIGTERM, signal.SIGINT)}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, previous)
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in previous.items():  # other threads do not block it, so it is ignored
            signal.signal(number, signal.SIG_IGN if number in blocked else handler)
