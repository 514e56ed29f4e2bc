"""`python -m data_pipeline COMMAND …`: runs a command of the table and turns errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.command_line import chosen, importing, log_to_stderr, run_command
from data_pipeline.commands.table import COMMANDS

PROGRAM = "python -m data_pipeline"


def main(arguments: Sequence[str]) -> None:
    if found := chosen(COMMANDS, PROGRAM, arguments):
        with importing():
            from common.settings.command import run_listed
        log_to_stderr("data_pipeline")
        run_listed(found[0], PROGRAM, found[1])


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
