"""A request to stop that comes while a rank waits for the others to start.

The wait is in C++, where no signal handler of Python runs, and a node that was stopped before its ranks started never comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ExitCode

__all__ = ["OTHERS_S", "stoppable_wait"]

OTHERS_S = 5.0
"""How long a rank that was asked to stop still waits for the others. If they come, the run stops in its usual way."""
_POLL_S = 0.1


@contextmanager
def stoppable_wait(others_s: float = OTHERS_S) -> Iterator[None]:
    """Around the wait for other ranks: ends this process with STOPPED if it is asked to stop and the wait goes on for `others_s`.

    Nothing is lost, as nothing was trained. A request that comes just before the end of the wait stays pending. Only signals that
    this thread blocks are looked at: the launcher's ranks block SIGTERM and SIGINT, and in other processes both act by themselves.
    """
    numbers = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}
    if not numbers:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(numbers, ended, others_s), name="stop-requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(numbers: set[int], ended: threading.Event, others_s: float) -> None:
    while not ended.is_set():
        found = signal.sigtimedwait(numbers, _POLL_S)
        if found is None:
            continue
        if not ended.wait(others_s):
            name = signal.Signals(found.si_signo).name
            if os.environ.get("LOCAL_RANK", "0") == "0":
                sys.stderr.write(f"stopped: {name} received before all ranks had started; nothing was trained\n")
                sys.stderr.flush()
            os._exit(ExitCode.STOPPED)
        os.kill(os.getpid(), found.si_signo)  # blocked in all threads, so it is pending again
        return
