from __future__ import annotations

from common.command_line import Command


def _row(name: str, summary: str, *, is_frequent: bool = False, renamed: str = "") -> Command:
    return Command(name, summary, f"data_pipeline.commands.{name}", is_frequent, renamed)


_ROWS = (
    _row(
        "prepare",
        "prepare text; the last line printed is the root digest (prepare --help all lists every setting)",
        is_frequent=True,
    ),
    _row(
        "inspect",
        "show a summary of prepared data; --json for programs; --document ID shows one document",
        is_frequent=True,
    ),
    _row("leaks", "search for training documents that resemble validation documents; --against FILE …: benchmarks too"),
    _row("repack", "pack the same documents into rows of another length, without tokenizing again"),
    _row("verify", "check every digest; name the first file that does not match", renamed="verify-data"),
    _row("schema", "print the JSON Schema of the settings; --env prints the environment variables", renamed="schema-data"),
)
COMMANDS = {command.name: command for command in _ROWS}  # by name, in the order of the help
