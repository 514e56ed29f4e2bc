"""`python -m data_pipeline COMMAND …`: runs a command of the table and turns errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from textwrap import fill

from common.command_line import Command, importing, log_to_stderr, run_command
from common.errors import ConfigError
from data_pipeline.commands.table import COMMANDS

PROGRAM = "python -m data_pipeline"
_INDENT, _WIDTH = 20, 80
_EXIT_CODES = """exit codes: 0 done; 2 bad setting; 3 bad data; 71 a worker was killed; 74 a file
could not be written; 75 stopped, run it again"""


def _listed(command: Command) -> str:
    """Return the help of a command: its arguments, and its summary on the same line, or below if they are long."""
    head, indent = f"  {command.name} {command.arguments}", " " * _INDENT
    if len(head) < _INDENT:
        return fill(f"{head:<{_INDENT}}{command.summary}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    lines = (
        fill(head, _WIDTH, subsequent_indent=" " * 10),
        fill(command.summary, _WIDTH, initial_indent=indent, subsequent_indent=indent),
    )
    return "\n".join(lines)


_LINES = "\n".join(map(_listed, COMMANDS.values()))
USAGE = f"""usage: {PROGRAM} COMMAND …

Turns text into packed, tokenised rows for training.

{_LINES}

{_EXIT_CODES}
"""


def main(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    if name in ("--help", "-h", "help"):
        print(USAGE, end="")
        return
    if name not in COMMANDS:
        raise ConfigError(f"{PROGRAM} {name}: no such command; the commands are {', '.join(COMMANDS)}")
    with importing():
        from common.settings.command import run_listed
    log_to_stderr("data_pipeline")
    run_listed(COMMANDS[name], PROGRAM, rest)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
