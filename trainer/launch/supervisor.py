"""Starts the ranks of this node, waits for them, and starts them again from the newest checkpoint after a crash.

torchrun can start ranks again itself. But it would also start again after a wrong setting or bad data, it makes no pause, it cannot
see whether a run makes progress, and it may crash itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError, ConfigError, ExitCode, NextStart
from common.hardware import num_oom_kills, why_killed
from trainer.launch.stop_request import STOP_SIGNALS, StopRequest, log_line
from trainer.runs.layout import saved_steps

RESTART_VARIABLES = ("TRAIN_MAX_RESTARTS", "TRAIN_RESTART_DELAY_S")
"""Settings of the launcher. They are removed from the environment, because the trainer refuses settings that it does not know."""

_MAX_RESTARTS = "3"
_DELAY_S = "5"
_MOST_DOUBLINGS = 6
_NUMBER = re.compile(r"[0-9]{1,6}")
_SIGNAL_BASE = 128  # a shell reports a process that signal N ended with the exit code 128 + N
_FINAL = {code for code in ExitCode if code.next_start is not NextStart.MAY_SUCCEED}


@dataclass(frozen=True)
class Ended:
    code: int  # its exit code, or 128 + N if signal N ended it, as in a shell
    reason: str = ""  # a message for users; may be empty

    @property
    def final(self) -> ExitCode | None:
        return ExitCode(self.code) if self.code in _FINAL else None


@dataclass(frozen=True)
class RestartPolicy:
    max_restarts: int  # the most restarts without a new checkpoint in between
    delay_s: int  # seconds before the first of these restarts. Each further pause is twice as long, up to 64 times.

    @classmethod
    def of(cls, variables: Mapping[str, str], num_nodes: str) -> RestartPolicy:
        # a group on several nodes is started again by its scheduler, on all nodes together
        texts = (
            variables.get("TRAIN_MAX_RESTARTS") or (_MAX_RESTARTS if num_nodes == "1" else "0"),
            variables.get("TRAIN_RESTART_DELAY_S") or _DELAY_S,
        )
        if not all(map(_NUMBER.fullmatch, texts)):
            found = " and ".join(f"{name} = {text}" for name, text in zip(RESTART_VARIABLES, texts, strict=True))
            raise ConfigError(f"{found} must be integers from 0 to 999999")
        return cls(*map(int, texts))

    def pause_s(self, num_restarts: int) -> int | None:
        """Return the pause after this many restarts without a new checkpoint; None if there is no further restart."""
        return None if num_restarts >= self.max_restarts else self.delay_s << min(num_restarts, _MOST_DOUBLINGS)


def supervise(
    run: Callable[[], Ended], policy: RestartPolicy, newest: Callable[[], int], stop: StopRequest, unseen: str = ""
) -> ExitCode:
    """Run a group until it needs no further start. `newest` returns the step of the newest checkpoint, negative if none."""
    num_restarts = 0
    while not stop.is_received():
        before = newest()
        group = run()
        if group.final is not None:
            return group.final
        if stop.is_received():
            return ExitCode.CRASHED
        if newest() > before:
            num_restarts = 0
        if (pause_s := policy.pause_s(num_restarts)) is None:
            if policy.max_restarts:
                log_line(f"not started again: {num_restarts} restarts have made no new checkpoint{unseen}")
            return ExitCode.CRASHED
        num_restarts += 1
        log_line(
            f"the ranks ended ({group.reason or f'code {group.code}'}); starting again from the newest checkpoint in {pause_s} s "
            f"(restart {num_restarts} of {policy.max_restarts} without a new one{unseen})"
        )
        stop.pause(pause_s)
    return ExitCode.STOPPED


def run_group(command: list[str], exit_file: Path, stop: StopRequest) -> Ended:
    # a new session, so that a Ctrl-C from the terminal reaches the group only once
    exit_file.write_bytes(b"")
    oom_kills = num_oom_kills()
    group = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
    )
    with stop.passed_on_to(group, saves=True):
        # Wait without reaping. As the first process of a container this one becomes the parent of orphans, which are reaped here.
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None or found.si_pid != group:
            if found is None:
                stop.wait_for_signal()
            else:
                os.waitpid(found.si_pid, 0)
    status = os.waitstatus_to_exitcode(os.waitpid(group, 0)[1])
    try:
        left = exit_file.read_text(errors="replace")
    except OSError:  # a system may remove old temporary files
        left = ""
    why = why_killed(oom_kills)
    if status == -signal.SIGKILL:  # it could not report this itself
        log_line(f"signal 9 (SIGKILL) ended the process that starts the ranks{f': {why}' if why else ''}")
    how = ended(status, left, why)
    if how.final is ExitCode.STOPPED and not left:
        log_line("stopped before a rank was started; no file was changed")
    return how


def ended(status: int, left: str, why_killed: str = "") -> Ended:
    """`status` is the exit code of torchrun, -N if signal N ended it; `left` is the content of the exit file."""
    code = status if status >= 0 else _SIGNAL_BASE - status
    if code == ExitCode.DONE:
        return Ended(code)
    words = left.partition("\n")[0].split(maxsplit=1)
    if words and _NUMBER.fullmatch(words[0]):
        return Ended(int(words[0]), "".join(words[1:]).strip())
    if code - _SIGNAL_BASE in STOP_SIGNALS:  # torchrun received a stop signal before it had started the ranks
        return Ended(ExitCode.STOPPED)
    return Ended(code, why_killed)


def newest_step(run: str) -> int:
    """Return the step of the newest checkpoint in a run directory; -1 if there is none or the directory is unknown."""
    with suppress(OSError, CheckpointError):
        return max(saved_steps(Path(run)), default=-1) if run else -1
    return -1
