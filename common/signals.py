from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from common.errors import StoppedBySignal

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def stop_on_signals(advice: str = "finished work is kept: run the same command again to go on") -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into StoppedBySignal and Ctrl-C into KeyboardInterrupt, both with the advice.

    After the first they are ignored, for the clean-up. One that was ignored stays so (`nohup`). In other threads nothing changes.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for other in before.keys() - {signal.SIGINT}:
            signal.signal(other, signal.SIG_IGN)
        error = KeyboardInterrupt if number == signal.SIGINT else StoppedBySignal
        raise error(f"{signal.Signals(number).name} received; {advice}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in _STOPS if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
