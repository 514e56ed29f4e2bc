"""The signal handlers of the launcher, installed in the process of a test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.launch.stop_request import STOP_SIGNALS, StopRequest


@contextmanager
def installed_request() -> Iterator[StopRequest]:
    """Yield a stop request that receives the signals of this process until the end of the block."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    stop = StopRequest()
    stop.install()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
