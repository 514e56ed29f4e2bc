"""`python -m trainer COMMAND`: runs a command of the table, and turns errors into exit codes. `trainer.program` uses it too."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from textwrap import fill
from typing import NoReturn

from common.command_line import PROGRAM, end_at_once, importing, run_command, write_error
from common.errors import ConfigError, ExitCode
from trainer.launch.command_table import COMMANDS
from trainer.launch.first_failure import only_first_failure
from trainer.machine.allocator import keep_memory
from trainer.machine.openmp import spin_briefly
from trainer.machine.private_caches import use_private_caches
from trainer.watchdog.processes import end_with_parent, write_exit_code


def main(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(f"usage: {PROGRAM} COMMAND [--help] [settings]\n\ncommands:")
        print(
            "\n".join(
                fill(f"  {command.name:<10} {command.summary}", 80, subsequent_indent=" " * 13) for command in COMMANDS.values()
            )
        )
        return
    if name not in COMMANDS:
        raise ConfigError(f"{name!r} is not a command; the commands are {', '.join(COMMANDS)}")
    keep_memory()
    spin_briefly()
    use_private_caches()
    with only_first_failure():
        with importing():
            from common.settings.command import run_listed
        settings = None
        if name == "train" and "RANK" in os.environ:
            end_with_parent()
            from trainer.launch.train_settings import handed_settings

            settings = handed_settings(rest)
        run_listed(COMMANDS[name], PROGRAM, rest, settings)


def _announce(line: str, code: ExitCode) -> None:
    """Print an error once for all ranks of this node, and write its exit code to the file that the launcher reads."""
    if write_exit_code(f"{code:d}"):
        with suppress(BrokenPipeError):
            write_error(line)


def start(arguments: Sequence[str]) -> NoReturn:
    """Run the command that the arguments name, and end this process with its exit code."""
    try:
        result = run_command(main, arguments, _announce)
    except Exception:
        sys.excepthook(*sys.exc_info())
        result = ExitCode.CRASHED
    end_at_once(result)  # also after a crash, because the destructors of a process group could wait for ranks that have ended


if __name__ == "__main__":
    start(sys.argv[1:])
