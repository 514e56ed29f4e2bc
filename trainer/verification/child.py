"""Starts a command that starts further processes, and leaves none of them behind."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from common.errors import StoppedBySignal
from trainer.watchdog import watch

__all__ = ["run_tied"]

_ENDING_S = 10.0


def run_tied(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and captures what it writes to stderr; the rest of its output is dropped.

    When this process ends, by Ctrl-C, SIGTERM, SIGKILL or in any other way, the command is killed. Ranks, and the workers of a
    preparation, end with the process that has started them: see `trainer.watchdog.processes.end_with_parent`. They get no time to
    save.

    Raises:
        StoppedBySignal: SIGTERM came.
        KeyboardInterrupt: SIGINT came.
    """
    tied = [*watch.tied_command(), *command]
    with _stopped_by_sigterm():
        process = subprocess.Popen(
            tied,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal comes here alone
        )
        try:
            _, told = process.communicate()
        except BaseException:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)  # returns once the last rank has ended
            raise
    return subprocess.CompletedProcess(tied, process.returncode, "", told)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StoppedBySignal("SIGTERM received; the check was given up, and nothing of the run was changed")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
