"""Starts the ranks of a single node without torch, passes stop requests on to them, and returns their exit code.

A node with other nodes, or with settings of torchrun that this module does not know, uses torchrun's agent (`agent.py`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.command_line import write_error
from common.errors import ExitCode
from common.hardware import num_oom_kills, why_killed
from trainer.distributed.network import STORE_VARIABLE
from trainer.launch.stop_request import STOP_SIGNALS
from trainer.watchdog.processes import EXIT_FILE_VARIABLE, LAUNCHER_VARIABLE

_EXPLAINED_BY_THE_RANK = set(ExitCode) - {ExitCode.DONE, ExitCode.CRASHED}

_ALONE = re.compile(r"PET_(NNODES|NPROC_PER_NODE|SHUTDOWN_TIMEOUT|MONITOR_INTERVAL|NODE_RANK|(MASTER|RDZV)_\w+)")
"""Variables of torchrun that this module obeys, or that have no effect on a single node."""
_CHECK_S = 1.0  # how late a stop signal is noticed that another thread got
_UNTIL_HANDLED = (signal.SIGTERM, signal.SIGINT)  # blocked in a new rank until it can handle them
_BY_DEFAULT = (*STOP_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ)  # not ignored in a rank, as they may be here


@dataclass(frozen=True)
class Failure:
    pid: int
    exitcode: int  # -N if signal N ended the process
    timestamp: float


def is_alone(arguments: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Return whether this module can start the ranks: one node, a known number of ranks, and no other settings of torchrun."""
    set_here = {name for name, value in variables.items() if value and name.startswith("PET_")}
    return (
        tuple(arguments[:3]) == ("-m", "trainer", "train")
        and (variables.get("PET_NNODES") or "1") == "1"
        and variables.get("PET_NPROC_PER_NODE", "").isdecimal()
        and all(map(_ALONE.fullmatch, set_here))
    )


def launch_here(words: Sequence[str], num_ranks: int, shutdown_s: float) -> ExitCode:
    """Run the ranks to their end. If one fails, or at a stop signal, all get SIGTERM, and SIGKILL after `shutdown_s` seconds.

    Return the exit code that the first failed rank chose, STOPPED, or CRASHED.
    """
    requests: list[int] = []  # threads that NumPy or torch have started block no signal, so one of them may get it
    for number in STOP_SIGNALS:  # the kernel drops a signal that is ignored, also a blocked one
        signal.signal(number, lambda number, _frame: requests.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    if signal.sigtimedwait(STOP_SIGNALS, 0) or requests:
        return ExitCode.STOPPED
    oom_kills = num_oom_kills()
    with private_folder() as store:
        running = {_start(words, rank, num_ranks, store): rank for rank in range(num_ranks)}
        failures = _wait_for(running, shutdown_s, requests)
    return exit_code_after(failures, oom_kills) if failures else ExitCode.DONE


def exit_code_after(failures: Mapping[int, Failure], oom_kills: int) -> ExitCode:
    """Return the exit code that the first failed rank chose, or CRASHED, after a line about the failure."""
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode in _EXPLAINED_BY_THE_RANK:
        return ExitCode(first.exitcode)
    if line := describe(failures, why_killed(oom_kills)):
        write_error(f"error: {line}")
    return ExitCode.CRASHED


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for the store, beside the exit file: the launcher removes it even if this process is killed."""
    exit_file = os.environ.get(EXIT_FILE_VARIABLE)
    return tempfile.TemporaryDirectory(prefix="ranks-", dir=Path(exit_file).parent if exit_file else None)


def describe(failures: Mapping[int, Failure], why_killed: str) -> str:
    """Return one line about the rank that failed first, killed ones first of all; empty if it has printed its error."""
    killed = {rank: failure for rank, failure in failures.items() if failure.exitcode == -signal.SIGKILL}
    rank, failure = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    process = f"rank {rank} (process {failure.pid})"
    if failure.exitcode == ExitCode.CRASHED:
        return ""
    if failure.exitcode >= 0:
        return f"{process} ended with exit code {failure.exitcode}; its message is above"
    ended_by = f"signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name}) ended {process}"
    if not killed:
        return ended_by
    return f"{ended_by}: {why_killed or 'another process sent it, and the kernel counts no process killed for lack of memory'}"


def _start(words: Sequence[str], rank: int, num_ranks: int, store: str) -> int:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
    own = {name: str(number) for name, number in numbers.items()} | {LAUNCHER_VARIABLE: str(os.getpid()), STORE_VARIABLE: store}
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-u", *words],
        {**os.environ, **own},
        setsid=True,
        setsigmask=_UNTIL_HANDLED,
        setsigdef=_BY_DEFAULT,
    )


def _wait_for(running: dict[int, int], shutdown_s: float, requests: list[int]) -> dict[int, Failure]:
    """Wait until no process of `running`, ranks by pid, is left. Return the failures that were found first, by rank."""
    failures: dict[int, Failure] = {}
    kill_at: float | None = None
    while running:
        left_s = _CHECK_S if kill_at is None else min(_CHECK_S, max(0.0, kill_at - time.monotonic()))
        found = signal.sigtimedwait({*STOP_SIGNALS, signal.SIGCHLD}, left_s)
        new = _reap(running)
        if (new and not failures) or requests or (found is not None and found.si_signo in STOP_SIGNALS):
            requests.clear()
            _send(running, signal.SIGTERM)
            kill_at = kill_at or time.monotonic() + shutdown_s
        elif kill_at is not None and time.monotonic() >= kill_at:
            _send(running, signal.SIGKILL)
            kill_at = None
        failures = failures or new
    return failures


def _reap(running: dict[int, int]) -> dict[int, Failure]:
    """Remove the processes that have ended from `running`. Return the failures among them, by rank."""
    failures = {}
    for pid, rank in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[pid]
            if code := os.waitstatus_to_exitcode(status):
                failures[rank] = Failure(pid, code, time.monotonic())
    return failures


def _send(running: Mapping[int, int], number: signal.Signals) -> None:
    for pid in running:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
