"""`python -m data_pipeline COMMAND …`: parses, calls one function, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from common.command_line import run_command
from common.errors import ConfigError, DataError
from common.redaction import RedactingFormatter
from common.settings.load import load_settings
from common.settings.options import help_parser, schema_text
from data_pipeline.config import PrepareConfig

PROGRAM = "python -m data_pipeline"
USAGE = f"""usage: {PROGRAM} COMMAND …

Turns text into packed, tokenised rows for training.

  prepare --sources PATH [PATH …] --output DIR [--recipe NAME|FILE] [--workers N] [--section.setting VALUE …]
                    prepare text; the last line printed is the root digest (prepare --help lists every setting)
  repack DIR --output DIR --row_length N
                    pack the same documents into rows of another length, without tokenizing again
  verify DIR        check every digest; name the first file that is wrong
  inspect DIR       show what is in prepared data; --json for programs; --document ID for one document
  leaks DIR         look for training documents that are like validation documents; --against FILE … for benchmarks too
  schema            print the JSON Schema of the settings; --env prints the environment variables

exit codes: 0 done; 2 bad setting; 3 bad data; 71 a worker was killed; 74 a file could not be written; 75 stopped, run it again
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command that the arguments name."""
    _log_to_stderr()
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    commands = {
        "prepare": _prepare,
        "repack": _repack,
        "verify": _verify,
        "inspect": _inspect,
        "leaks": _leaks,
        "schema": _schema,
    }
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


def _repack(arguments: Sequence[str]) -> None:
    parser = _folder_parser("repack", "Packs the documents of prepared data into rows of another length.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder that receives the result")
    parser.add_argument("--row_length", type=int, required=True, metavar="N", help="tokens in a row, from 8 to 1048576")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes; one per core if not given")
    parser.add_argument("--replace", action="store_true", help="replace other finished data in that folder")
    options = parser.parse_args(arguments)
    from data_pipeline.repack import repack

    manifest = repack(options.directory, options.output, options.row_length, options.workers, replace=options.replace)
    print(f"root digest {manifest.root_digest}")


def _verify(arguments: Sequence[str]) -> None:
    parser = _folder_parser("verify", "Checks every digest of prepared data; names the first file that is wrong.")
    directory = parser.parse_args(arguments).directory
    from data_pipeline.dataset.manifest import verify

    manifest = verify(directory)
    print(f"{len(manifest.shards) + len(manifest.files)} files match\nroot digest {manifest.root_digest}")


def _inspect(arguments: Sequence[str]) -> None:
    parser = _folder_parser("inspect", "Shows what is in prepared data.")
    parser.add_argument("--json", action="store_true", help="print it for programs")
    parser.add_argument("--document", type=int, metavar="ID", help="print one document by its id, as in the rows' documents")
    options = parser.parse_args(arguments)
    from data_pipeline.dataset.manifest import read_manifest
    from data_pipeline.reports.terminal import describe, malformed, summarise

    if options.document is not None:
        from common.text import visible
        from data_pipeline.dataset.stored_documents import read_document

        text = read_document(options.directory, read_manifest(options.directory), options.document).text
        print(visible(text) if sys.stdout.isatty() else text)
        return
    manifest = read_manifest(options.directory)
    with malformed(options.directory):
        summary = summarise(manifest)
        shown = json.dumps(summary, indent=2) if options.json else describe(summary)
    print(shown)


def _leaks(arguments: Sequence[str]) -> None:
    parser = _folder_parser("leaks", "Looks for validation documents, and items of benchmarks, in the training text.")
    parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="FILE", help="benchmark files (.jsonl, .txt)")
    parser.add_argument("--strict", action="store_true", help="fail when an item of a benchmark is found, too")
    parser.add_argument("--json", action="store_true", help="print it for programs")
    options = parser.parse_args(arguments)
    from data_pipeline.config import DedupSettings
    from data_pipeline.dataset.locks import reading
    from data_pipeline.dataset.manifest import read_manifest
    from data_pipeline.dataset.splits import SPLITS
    from data_pipeline.dataset.stored_documents import read_documents, settings_in
    from data_pipeline.dedup.leaks import check_leaks

    with reading(options.directory, "leaks"):
        manifest = read_manifest(options.directory)
        settings = settings_in(manifest, "dedup", DedupSettings, benchmarks=())
        train, val = (read_documents(options.directory, manifest, side) for side in SPLITS)
        report = check_leaks(train, val, settings, options.against)
    print(json.dumps(report.summary(), indent=2) if options.json else report.describe())
    if report.leaked or (options.strict and report.contaminated):
        raise DataError(f"{options.directory}: what it is to be tested with is in the training text; the list above says where")


def _schema(arguments: Sequence[str]) -> None:
    print(schema_text(PrepareConfig, PROGRAM, arguments))


def _folder_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {command}", description=description)
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder that `prepare` has written")
    return parser


def _log_to_stderr() -> None:
    logger = logging.getLogger("data_pipeline")
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
