"""`python -m trainer COMMAND`: runs a command of the table, and turns errors into exit codes. `trainer.program` uses it too."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from common.command_line import PROGRAM, chosen, end_at_once, importing, run_command, write_error
from common.errors import ExitCode
from trainer.launch.command import COMMANDS
from trainer.launch.first_failure import only_first_failure
from trainer.machine.before_torch import keep_memory, spin_briefly, use_private_caches
from trainer.watchdog.processes import end_with_parent, write_exit_code


def main(arguments: Sequence[str]) -> None:
    if (found := chosen(COMMANDS, PROGRAM, arguments)) is None:
        return
    command, rest = found
    keep_memory()
    spin_briefly()
    use_private_caches()
    with only_first_failure():
        with importing():
            from common.settings.command import run_listed
        settings = None
        if command.name == "train" and "RANK" in os.environ:
            end_with_parent()
            from trainer.launch.train_settings import handed_settings

            settings = handed_settings(rest)
        run_listed(command, PROGRAM, rest, settings)


def _announce(line: str, code: ExitCode) -> None:
    """Print an error once for all ranks of this node, and write its exit code to the file that the launcher reads."""
    if write_exit_code(f"{code:d}"):
        with suppress(BrokenPipeError):
            write_error(line)


def start(arguments: Sequence[str]) -> NoReturn:
    try:
        result = run_command(main, arguments, _announce)
    except Exception:
        sys.excepthook(*sys.exc_info())
        result = ExitCode.CRASHED
    end_at_once(result)  # also after a crash, because the destructors of a process group could wait for ranks that have ended


if __name__ == "__main__":
    start(sys.argv[1:])
