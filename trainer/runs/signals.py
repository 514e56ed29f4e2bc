"""A stop signal, SIGTERM or SIGINT. It is noted at once and takes effect between two steps.

Under `trainer.launch.agent` both signals are blocked when a rank starts, and again at its end. A signal during loading waits for
`stop_signal`, and a signal after the last save is ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """The name of the signal that asked for a stop; None before it arrives."""

    def __init__(self) -> None:
        self.name: str | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name  # further signals change nothing, because the run stops already


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Catch SIGTERM and SIGINT in this context, even if they were blocked. A signal that was blocked is ignored after it.

    Only the main thread can catch signals. In other threads nothing changes.
    """
    request = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.note) for number in (signal.SIGTERM, signal.SIGINT)}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, previous)
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in previous.items():  # other threads do not block it, so it is ignored
            signal.signal(number, signal.SIG_IGN if number in blocked else handler)
