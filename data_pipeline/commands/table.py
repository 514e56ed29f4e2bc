"""The table of the commands of `python -m data_pipeline`.

The options of a command are in the module of its name in `options/`, its work in the module of its name in this package.
"""

from __future__ import annotations

from common.command_line import Command

__all__ = ["COMMANDS"]


def _command(name: str, options: str, arguments: str, summary: str) -> Command:
    return Command(
        name, summary, f"data_pipeline.commands.options.{name}:{options}", f"data_pipeline.commands.{name}:run", arguments=arguments
    )


_PREPARE = Command(
    "prepare",
    "prepare text; the last line printed is the root digest (prepare --help all lists every setting)",
    "data_pipeline.config:PrepareConfig",
    "data_pipeline.commands.prepare:run",
    "Turns text into packed, tokenised rows for training.",
    "--sources PATH … --output DIR [--recipe NAME|FILE] [--SETTING VALUE …]",
)
_SCHEMA = Command(
    "schema",
    "print the JSON Schema of the settings; --env prints the environment variables",
    "common.settings.options:SchemaOptions",
    "data_pipeline.commands.schema:run",
)
_ROWS = (
    _PREPARE,
    _command(
        *("repack", "RepackOptions", "DIR --output DIR --row_length N"),
        "pack the same documents into rows of another length, without tokenizing again",
    ),
    _command("verify", "VerifyOptions", "DIR", "check every digest; name the first file that does not match"),
    _command(
        *("inspect", "InspectOptions", "DIR"),
        "show a summary of prepared data; --json for programs; --document ID shows one document",
    ),
    _command(
        *("leaks", "LeaksOptions", "DIR"),
        "search for training documents that resemble validation documents; --against FILE …: benchmarks too",
    ),
    _SCHEMA,
)
COMMANDS = {command.name: command for command in _ROWS}
"""The commands by name, in the order of the help."""
