"""The signals with which a terminal, a scheduler or Docker asks the launcher to stop."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from trainer.launch.notices import say

__all__ = ["STOP_SIGNALS", "StopRequest"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""`entrypoints/train` blocks them until this process can handle them."""


class StopRequest:
    """The first stop signal, which is passed on to the child as SIGTERM. Later stop signals change nothing."""

    def __init__(self) -> None:
        self._is_received = False
        self._child: int | None = None
        self._child_saves = False
        self._is_passed_on = False
        self._wake_reader, self._wake_writer = os.pipe()

    def install(self) -> None:
        """Handles the stop signals from now on, including those that came while they were blocked.

        A signal that was ignored when this process started stays ignored: `nohup` asks for that.
        """
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def is_received(self) -> bool:
        """True from the first stop signal on."""
        return self._is_received

    @contextmanager
    def passed_on_to(self, child: int, *, saves: bool = False) -> Iterator[None]:
        """Passes a request on to a child while the context lasts, even a request that came before.

        The child must not be reaped within the context, because its number could then belong to another process.

        Args:
            child: the number of its process.
            saves: whether the child saves a checkpoint before it ends; it decides what users are told.
        """
        self._is_passed_on, self._child_saves = False, saves
        self._child = child
        try:
            self._pass_on()
            yield
        finally:
            self._child = None

    def pause(self, seconds: float) -> None:
        """Waits, but no longer than until a stop is requested."""
        select.select([self._wake_reader], [], [], seconds)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._is_received:
            return
        self._is_received = True
        saves = self._child is not None and self._child_saves
        what_follows = "finishing the step and saving" if saves else "nothing is started any more"
        say(f"{signal.Signals(number).name} received; {what_follows}")
        self._pass_on()
        os.write(self._wake_writer, b"\0")

    def _pass_on(self) -> None:
        if self._is_received and self._child is not None and not self._is_passed_on:
            self._is_passed_on = True
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)
