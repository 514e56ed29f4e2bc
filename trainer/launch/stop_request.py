"""The signals with which a terminal, a scheduler or Docker asks the launcher to stop, and the launcher its ranks; its lines."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from common.terminal import printable

_STDERR = 2
_CLEAR_LINE = "\r\x1b[K"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The stop signals. `entrypoints/train` blocks them until this process can handle them."""


def log_line(line: str) -> None:
    """Safe inside a signal handler, where a buffered stream may be in use. Write errors are ignored: the launcher must wait for its
    ranks. The line replaces the bar of rank 0, which is drawn again below it.
    """
    with suppress(OSError):
        clear = _CLEAR_LINE if os.isatty(_STDERR) else ""
        os.write(_STDERR, f"{clear}train: {printable(line)}\n".encode(errors="backslashreplace"))


class StopRequest:
    """A request to stop. The first stop signal is passed on to the child as SIGTERM; later ones have no effect."""

    def __init__(self, what_follows: str = "") -> None:
        self._what_follows = what_follows
        self._received: signal.Signals | None = None
        self._child: int | None = None
        self._child_saves = False
        self._is_passed_on = False
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)

    def install(self) -> None:
        """Handle the stop signals, also those that arrived while they were blocked. One ignored at the start stays so (`nohup`).
        SIGCHLD is handled too, so that the end of a child wakes this process.
        """
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def is_received(self) -> bool:
        return self._received is not None

    def is_interrupt(self) -> bool:
        return self._received == signal.SIGINT

    @contextmanager
    def passed_on_to(self, child: int, *, saves: bool = False) -> Iterator[None]:
        """Pass stop requests on, also earlier ones. The child must not be reaped meanwhile, or its pid may be another process."""
        self._is_passed_on, self._child_saves = False, saves
        self._child = child
        try:
            self._pass_on()
            yield
        finally:
            self._child = None

    def wait_for_signal(self, timeout_s: float | None = None) -> None:
        """Wait until a signal arrives, or return at once if one has arrived since the last call. The C-level signal handler writes
        to a pipe: Python runs its handlers only between two bytecodes, so a signal just before the system call would be missed.
        """
        select.select([self._wake_reader], [], [], timeout_s)
        with suppress(BlockingIOError):
            os.read(self._wake_reader, select.PIPE_BUF)

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_received() and (left := end - time.monotonic()) > 0:
            self.wait_for_signal(left)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            return
        self._received = signal.Signals(number)
        saves = self._child is not None and self._child_saves
        default = "stopping, after a save if a step was trained" if saves else "nothing is started any more"
        log_line(f"{self._received.name} received; {self._what_follows or default}")
        self._pass_on()

    def _pass_on(self) -> None:
        if self._received is not None and self._child is not None and not self._is_passed_on:
            self._is_passed_on = True
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)


class StopSignal:
    """The name of the signal that asked for a stop; None before it arrives."""

    def __init__(self) -> None:
        self.name: str | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name  # further signals change nothing, because the run stops already


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Catch SIGTERM and SIGINT in this context, even if they were blocked. A signal that was blocked is ignored after it.

    Only the main thread can catch signals. In other threads nothing changes. Under `trainer.launch.agent` both signals are blocked
    when a rank starts, and again at its end: one during loading waits for this context, and one after the last save is ignored.
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
