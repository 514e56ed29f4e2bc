"""`python -m data_pipeline prepare|verify|inspect|schema`: parses, calls one function, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.config import PrepareConfig
from data_pipeline.errors import ConfigError, run_command
from data_pipeline.settings import help_parser, load_settings, schema_text

PROGRAM = "python -m data_pipeline"
USAGE = f"""usage: {PROGRAM} COMMAND …

Turns text into packed, tokenised rows for training.

  prepare --sources PATH [PATH …] --output DIR [--recipe NAME|FILE] [--workers N] [--section.setting VALUE …]
                    prepare text; the last line printed is the root digest (prepare --help lists every setting)
  verify DIR        check every digest; name the first file that is wrong
  inspect DIR       show what is in prepared data; --json for programs
  schema            print the JSON Schema of the settings; --env prints the environment variables

exit codes: 0 done; 2 bad setting; 3 bad data; 71 a worker was killed; 74 a file could not be written; 75 stopped, run it again
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command that the arguments name."""
    _log_to_stderr()
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    commands = {"prepare": _prepare, "verify": _verify, "inspect": _inspect, "schema": _schema}
    if command in ("--help", "-h", "help"):
        print(USAGE, end="")
    elif command in commands:
        commands[command](rest)
    else:
        raise ConfigError(f"{PROGRAM} {command}: no such command; there are {', '.join(commands)}")


def _prepare(arguments: Sequence[str]) -> None:
    parser = help_parser(PrepareConfig, f"{PROGRAM} prepare", "Turns text into packed, tokenised rows for training.")
    config = load_settings(PrepareConfig, arguments, parser)
    from data_pipeline.prepare import prepare

    print(f"root digest {prepare(config).root_digest}")


def _verify(arguments: Sequence[str]) -> None:
    parser = _folder_parser("verify", "Checks every digest of prepared data; names the first file that is wrong.")
    directory = parser.parse_args(arguments).directory
    from data_pipeline.inspection import verify

    manifest = verify(directory)
    print(f"{len(manifest.shards) + len(manifest.files)} files match\nroot digest {manifest.root_digest}")


def _inspect(arguments: Sequence[str]) -> None:
    parser = _folder_parser("inspect", "Shows what is in prepared data.")
    parser.add_argument("--json", action="store_true", help="print it for programs")
    options = parser.parse_args(arguments)
    from data_pipeline.inspection import describe, summarise
    from data_pipeline.manifest import read_manifest

    summary = summarise(read_manifest(options.directory))
    print(json.dumps(summary, indent=2) if options.json else describe(summary))


def _schema(arguments: Sequence[str]) -> None:
    print(schema_text(PrepareConfig, PROGRAM, arguments))


def _folder_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {command}", description=description)
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder that `prepare` has written")
    return parser


def _log_to_stderr() -> None:
    logger = logging.getLogger("data_pipeline")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
