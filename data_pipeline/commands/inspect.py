"""`inspect`: shows a summary of prepared data, or one of its documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.text import visible
from data_pipeline.commands.options.inspect import InspectOptions
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.stored_documents import read_document
from data_pipeline.reports.terminal import describe, malformed, summarise

__all__ = ["run"]


def run(options: InspectOptions) -> None:
    """Print a summary, or the text of one document.

    Raises:
        PreparedDataError: the manifest is missing or damaged.
        ConfigError: there is no such document, or the data does not hold the tokens of its documents.
    """
    if options.document is not None:
        _print_document(options.directory, options.document)
        return
    manifest = read_manifest(options.directory)
    with malformed(options.directory):
        summary = summarise(manifest)
        shown = json.dumps(summary, indent=2) if options.as_json else describe(summary)
    print(shown)


def _print_document(directory: Path, identity: int) -> None:
    text = read_document(directory, read_manifest(directory), identity).text
    print(visible(text) if sys.stdout.isatty() else text)
