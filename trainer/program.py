"""The program `trainer`, which the installation of this project provides: one list of the commands of both packages."""

from __future__ import annotations

import os
import signal
import site
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["DATA_COMMANDS", "main"]

DATA_COMMANDS = {
    "prepare": "prepare",
    "inspect": "inspect",
    "leaks": "leaks",
    "repack": "repack",
    "verify-data": "verify",
    "schema-data": "schema",
}
"""The commands of `python -m data_pipeline`, by their names in this program: the trainer has a `verify` and a `schema` too."""
_FIRST = ("prepare", "plan", "train", "evaluate", "generate", "report", "compare", "runs", "inspect", "verify", "audit")
_INDENT, _WIDTH = 14, 80
_INTERRUPTED = 130
_HELP_OF_COMPLETION = """usage: {program} completion {shells}

Prints a script that completes commands and settings in the shell.

Example for bash:
  source <({program} completion bash)
"""


def main() -> NoReturn:
    """Run the command that the command line names, and end this process with its exit code."""
    signal.signal(signal.SIGINT, _end_at_once)  # until a command can stop in order
    from common.command_line import end_at_once, run_command
    from trainer.launch.command_table import COMMANDS

    words = sys.argv[1:]
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help", *words[2:]]
    name = words[0] if words else "help"
    keep_to_this_code()
    if name == "train":
        from trainer.launch.__main__ import main as launch
        from trainer.launch.stop_request import STOP_SIGNALS

        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the launcher can handle them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_at_once(run_command(launch, words))
    if name in COMMANDS:
        from trainer.__main__ import start

        signal.signal(signal.SIGINT, signal.default_int_handler)
        start(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_at_once(run_command(run_here, words))


def keep_to_this_code() -> None:
    """Let child processes import these packages, and nothing from the working directory, because its files may be a stranger's."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*paths, *site.getsitepackages()):
        paths.insert(0, root)
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_here(words: Sequence[str]) -> None:
    """Print the list of commands or the version, or run a command on data.

    Raises:
        ConfigError: there is no such command.
    """
    from common.command_line import PROGRAM, importing, log_to_stderr
    from common.errors import ConfigError
    from common.places import VERSION
    from data_pipeline.commands.table import COMMANDS

    name, rest = (words[0], words[1:]) if words else ("help", ())
    if name in ("help", "-h", "--help"):
        sys.stdout.write(list_of_commands())
        return
    if name in ("--version", "-V"):
        sys.stdout.write(f"{PROGRAM} {VERSION}\n")
        return
    if name == "completion":
        print_completion(rest)
        return
    with importing():
        from common.settings.command import run_listed
        from common.settings.messages import nearest
    if name not in DATA_COMMANDS:
        raise ConfigError(
            f"{name!r} is not a command{nearest(name, [*_summaries(), 'help', 'completion'])} (all commands: {PROGRAM} help)"
        )
    log_to_stderr("data_pipeline")
    run_listed(replace(COMMANDS[DATA_COMMANDS[name]], name=name), PROGRAM, rest)


def print_completion(words: Sequence[str]) -> None:
    """Print the completion script for the shell that the words name.

    Raises:
        ConfigError: they name no shell that has one.
    """
    from common.command_line import PROGRAM
    from common.errors import ConfigError
    from common.settings.command import option_names
    from data_pipeline.commands.table import COMMANDS as OF_DATA
    from trainer.completion import SHELLS, completion_script
    from trainer.launch.command_table import COMMANDS as OF_TRAINER

    if words in (["-h"], ["--help"]):
        sys.stdout.write(_HELP_OF_COMPLETION.format(program=PROGRAM, shells="|".join(SHELLS)))
        return
    shell = words[0] if len(words) == 1 else ""
    if shell not in SHELLS:
        raise ConfigError(f"{PROGRAM} completion needs the name of a shell: {', '.join(SHELLS)}")
    commands = {name: OF_DATA[listed] for name, listed in DATA_COMMANDS.items()} | OF_TRAINER
    sys.stdout.write(completion_script(shell, {name: option_names(command) for name, command in commands.items()}))


def list_of_commands() -> str:
    """Return the help of the program: its commands, with the most used ones first, in at most 80 columns."""
    from common.command_line import PROGRAM

    summaries = _summaries()
    others = [name for name in summaries if name not in _FIRST]
    return "\n".join(
        (
            f"usage: {PROGRAM} COMMAND [--SETTING VALUE ...]",
            "",
            *(_entry(name, summaries[name]) for name in _FIRST),
            "",
            "more commands:",
            *(_entry(name, summaries[name]) for name in others),
            _entry("completion", "print a script that completes commands and settings: bash, zsh, fish"),
            "",
            f"{PROGRAM} help COMMAND shows the settings of a command.",
            "",
        )
    )


def _summaries() -> dict[str, str]:
    """Return the summary of each command of this program."""
    from data_pipeline.commands.table import COMMANDS as OF_DATA
    from trainer.launch.command_table import COMMANDS as OF_TRAINER

    of_data = {name: OF_DATA[listed].summary for name, listed in DATA_COMMANDS.items()}
    return of_data | {name: command.summary for name, command in OF_TRAINER.items()}


def _entry(name: str, summary: str) -> str:
    from textwrap import fill

    indent = " " * _INDENT
    return fill(f"  {name:<{_INDENT - 2}}{summary}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _end_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, b"stopped: interrupted with Ctrl-C\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
