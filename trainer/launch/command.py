"""The commands that `entrypoints/train` runs for its arguments."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from trainer.launch.command_table import COMMANDS
from trainer.launch.stop_request import STOP_SIGNALS

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # exit codes of a shell for a program that it cannot start


def other_command(words: Sequence[str]) -> list[str] | None:
    first = words[0] if words else ""
    if first and first != "train" and not first.startswith("-"):
        return [*_python("trainer"), *words] if first in COMMANDS else list(words)
    if asked := [index for index, word in enumerate(words) if word in ("-h", "--help")]:  # print help once, not from every rank
        detail = ["all"] if words[asked[0] + 1 : asked[0] + 2] == ["all"] else []
        return [*_python("trainer"), "train", "--help", *detail]
    return None


def training_arguments(words: Sequence[str]) -> list[str]:
    return list(words[1:] if words[:1] == ["train"] else words)


def group_command(arguments: Sequence[str]) -> list[str]:
    """Ranks end with a killed launcher. SIGINT and SIGQUIT are ignored until torchrun handles them, so there is no traceback."""
    tied = ("env", "--ignore-signal=INT,QUIT", "setpriv", "--pdeathsig", "KILL")
    return [*tied, *_python("trainer.launch.torchrun"), "-m", "trainer", "train", *arguments]


def training_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a launcher, which trains with these options. It is killed when this process ends."""
    blocked = ",".join(number.name.removeprefix("SIG") for number in STOP_SIGNALS)
    tied = ("env", f"--block-signal={blocked}", "setpriv", "--pdeathsig", "KILL")
    return [*tied, *_python("trainer.launch"), "train", *arguments]


def folder_of(name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    option, found = f"--{name}", variables.get(f"TRAIN_{name.upper()}", "")
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        if argument.startswith(f"{option}="):
            found = argument.removeprefix(f"{option}=")
        if previous == option:
            found = argument
    return found


def become(command: list[str]) -> NoReturn:
    for number in _IGNORED_BY_PYTHON:  # else the program would inherit this
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(
            f"error: {command[0]} is neither a command nor a program that can be started ({error.strerror}); the commands are "
            f"{', '.join(COMMANDS)}\n"
        )
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]
