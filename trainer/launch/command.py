"""The commands of the trainer, a row each, and those that `entrypoints/train` runs for its arguments. It must load quickly."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from common.command_line import Command
from trainer.launch.stop_request import STOP_SIGNALS


def _row(name: str, summary: str, *, module: str = "", is_frequent: bool = False, listens: bool = False) -> Command:
    return Command(name, summary, f"trainer.commands.{module or name}", is_frequent, listens=listens)


_ROWS = (
    _row("train", "train a model, or continue a run that was stopped", is_frequent=True, listens=True),
    _row("plan", "show the length, memory, disk space and time of a training", is_frequent=True),
    _row("evaluate", "compute validation loss and other measures of a checkpoint", is_frequent=True),
    _row("generate", "write text with the model of a checkpoint", is_frequent=True),
    _row("serve", "answer programs by OpenAI's API, with a page to try the model", is_frequent=True, listens=True),
    _row("report", "write report.html and training_metrics.png of a run", is_frequent=True),
    _row("compare", "write one page that compares several runs", is_frequent=True),
    _row("runs", "list the runs in a folder: state, steps, validation loss", is_frequent=True),
    _row(
        "verify",
        "check that a run's files are intact, that the environment is the same, and that steps give the same bits again",
        is_frequent=True,
    ),
    _row("audit", "prove that no row was trained twice or left out, or show the text of one step", is_frequent=True),
    _row("classify", "print the label of each text, with a classification model"),
    _row("compress", "write a smaller copy of a model: int8, int4 or pruned"),
    _row("export", "write a model for transformers, vLLM, llama.cpp or ONNX"),
    _row("tune", "search for the settings with the lowest validation loss", listens=True),
    _row("import", "make a run of a published model of Hugging Face", module="import_model"),
    _row("doctor", "check GPUs, driver, disks, network and versions of this machine", listens=True),
    _row("stacks", "print the stacks of all threads of a running training"),
    _row("schema", "print the JSON Schema of the settings of `train`; --env prints their environment variables"),
)
COMMANDS = {command.name: command for command in _ROWS}  # by name, in the order of the help


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
