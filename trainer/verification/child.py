"""Runs a command that starts further processes, and ends all of them."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from common.errors import StoppedBySignal
from trainer.watchdog import watch

_ENDING_S = 10.0


def run_tied(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its stderr. It is killed, without a save, when this process ends in any way."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StoppedBySignal("SIGTERM received; the check was stopped, and the run was not changed")

    tied = [*watch.tied_command(), *command]
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, stop))
        process = subprocess.Popen(
            tied,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal reaches this process alone
        )
        try:
            _, stderr = process.communicate()
        except BaseException:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)  # returns once the last rank has ended
            raise
    return subprocess.CompletedProcess(tied, process.returncode, "", stderr)
