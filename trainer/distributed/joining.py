"""Stop requests that arrive while a rank waits for the other ranks to start.

That wait runs in C++, so Python's signal handlers do not run. It would never end if another node was stopped before its ranks
started.
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
"""Seconds for which a rank still waits for the others after a stop request. If they join in time, the run stops as usual."""
_POLL_S = 0.1


@contextmanager
def stoppable_wait(others_s: float = OTHERS_S) -> Iterator[None]:
    """End this process with STOPPED if a stop request arrives during the wait for other ranks and the wait lasts `others_s` longer.
    No work is lost, because no step was trained. If the wait ends sooner, the signal stays pending. Only signals that this
    thread blocks are handled: the launcher's ranks block SIGTERM and SIGINT.
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
