"""Starts the ranks of this node, waits for them, and starts them again from the newest checkpoint after a crash.

torchrun could start ranks again itself. But it would also repeat a wrong configuration or bad data, makes no pause, cannot see
whether a run makes progress, and ends with its own process.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, ExitCode
from trainer.launch.notices import say
from trainer.launch.stop_request import STOP_SIGNALS, StopRequest

__all__ = ["RESTART_VARIABLES", "Ended", "RestartPolicy", "ended", "newest_step", "run_group", "supervise"]

RESTART_VARIABLES = ("TRAIN_MAX_RESTARTS", "TRAIN_RESTART_DELAY_S")
"""They are settings of the launcher. The trainer, which refuses settings that it does not know, must not see them."""

_MAX_RESTARTS = "3"
_DELAY_S = "5"
_MOST_DOUBLINGS = 6
_NUMBER = re.compile(r"[0-9]{1,6}")
_CHECKPOINT = re.compile(r"step-([0-9]+)")
_SIGNAL_BASE = 128
"""A shell gives a process that signal N ended the exit code 128 + N."""
_MAY_SUCCEED_NEXT_TIME = {ExitCode.CRASHED, ExitCode.WORKER}
_FINAL = set(ExitCode) - _MAY_SUCCEED_NEXT_TIME


@dataclass(frozen=True)
class Ended:
    """How a group of ranks has ended."""

    code: int
    """As a shell counts: 128 + N if signal N ended it."""
    reason: str = ""
    """Words for users; empty if there are none."""

    @property
    def final(self) -> ExitCode | None:
        """The exit code of the launcher, if another start would end in the same way or is not wanted; else None."""
        return ExitCode(self.code) if self.code in _FINAL else None


@dataclass(frozen=True)
class RestartPolicy:
    """How often and after which pauses a group is started again."""

    max_restarts: int
    """Without a new checkpoint in between."""
    delay_s: int
    """Before the first of them. Each further pause is twice as long."""

    @classmethod
    def of(cls, variables: Mapping[str, str], num_nodes: str) -> RestartPolicy:
        """The policy that the variables ask for. A group of several nodes is started again by its scheduler, on all nodes together.

        Raises:
            ConfigError: a value is no whole number from 0 to 999999.
        """
        texts = (
            variables.get("TRAIN_MAX_RESTARTS") or (_MAX_RESTARTS if num_nodes == "1" else "0"),
            variables.get("TRAIN_RESTART_DELAY_S") or _DELAY_S,
        )
        if not all(map(_NUMBER.fullmatch, texts)):
            found = " and ".join(f"{name} = {text}" for name, text in zip(RESTART_VARIABLES, texts, strict=True))
            raise ConfigError(f"{found} must be whole numbers from 0 to 999999")
        return cls(*map(int, texts))

    def pause_s(self, num_restarts: int) -> int | None:
        """Seconds to wait after so many restarts without a new checkpoint; None if there is no further restart."""
        return None if num_restarts >= self.max_restarts else self.delay_s << min(num_restarts, _MOST_DOUBLINGS)


def supervise(
    run: Callable[[], Ended], policy: RestartPolicy, newest: Callable[[], int], stop: StopRequest, unseen: str = ""
) -> ExitCode:
    """Runs a group of ranks until it has ended for good.

    Args:
        run: starts the group and waits for its end.
        policy: about restarts.
        newest: returns the step of the newest checkpoint, a negative number if there is none.
        stop: nothing is started once it is received.
        unseen: added to messages about checkpoints, if the run is not known.

    Returns:
        The exit code of the launcher.
    """
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
                say(f"not started again: {num_restarts} restarts have made no new checkpoint{unseen}")
            return ExitCode.CRASHED
        num_restarts += 1
        say(
            f"the ranks ended ({group.reason or f'code {group.code}'}); starting again from the newest checkpoint in {pause_s} s "
            f"(restart {num_restarts} of {policy.max_restarts} without a new one{unseen})"
        )
        stop.pause(pause_s)
    return ExitCode.STOPPED


def run_group(command: list[str], exit_file: Path, stop: StopRequest) -> Ended:
    """Runs a command to its end, in a session of its own; a stop request is passed on to it.

    With its own session the command does not also get a Ctrl-C from the terminal.

    Args:
        command: starts the ranks.
        exit_file: where the first rank that fails, or the watchdog, leaves the reason.
        stop: the request of this process, installed.
    """
    exit_file.write_bytes(b"")
    group = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
    )
    with stop.passed_on_to(group, saves=True):
        _wait_for(group, stop)
    status = os.waitstatus_to_exitcode(os.waitpid(group, 0)[1])
    try:
        left = exit_file.read_text(errors="replace")
    except OSError:  # a system may remove old temporary files
        left = ""
    return ended(status, left)


def ended(status: int, left: str) -> Ended:
    """How a group has ended.

    Args:
        status: exit code of torchrun, -N if signal N ended it. torchrun makes 1 of every exit code of a rank.
        left: the content of the exit file: an exit code, and perhaps words behind it.
    """
    code = status if status >= 0 else _SIGNAL_BASE - status
    if code == ExitCode.DONE:
        return Ended(code)
    words = left.partition("\n")[0].split(maxsplit=1)
    if words and _NUMBER.fullmatch(words[0]):
        return Ended(int(words[0]), "".join(words[1:]).strip())
    if code - _SIGNAL_BASE in STOP_SIGNALS:  # torchrun was asked to stop before it had started the ranks
        return Ended(ExitCode.STOPPED)
    return Ended(code)


def newest_step(run: str) -> int:
    """The step of the newest checkpoint in the directory of a run, -1 if there is none or the run is not known."""
    names: list[str] = []
    if run:
        with suppress(OSError):
            names = [path.name for path in (Path(run) / "checkpoints").iterdir()]
    return max((int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name))), default=-1)


def _wait_for(child: int, stop: StopRequest) -> None:
    """Waits until a child has ended, and leaves it to be reaped.

    The first process of a container without an init is also given the orphans of others. They are reaped on the way.
    """
    while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None or found.si_pid != child:
        if found is None:
            stop.wait_for_signal()
        else:
            os.waitpid(found.si_pid, 0)
