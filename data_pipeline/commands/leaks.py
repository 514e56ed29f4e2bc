"""`leaks`: searches the training text for the text of validation and of benchmarks."""

from __future__ import annotations

import json

from common.errors import DataError
from data_pipeline.commands.options.leaks import LeaksOptions
from data_pipeline.config import DedupConfig
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.dataset.stored_documents import read_documents, settings_in
from data_pipeline.dedup.leaks import check_leaks

__all__ = ["run"]


def run(options: LeaksOptions) -> None:
    """Print the leaks that were found.

    Raises:
        DataError: the training text holds validation text, or with `--strict` benchmark text.
        PreparedDataError: a part of the data is missing or damaged.
    """
    with reading(options.directory, "leaks"):
        manifest = read_manifest(options.directory)
        settings = settings_in(manifest, "dedup", DedupConfig, benchmarks=())
        train, val = (read_documents(options.directory, manifest, side) for side in SPLITS)
        report = check_leaks(train, val, settings, options.against)
    print(json.dumps(report.summary(), indent=2) if options.as_json else report.describe())
    if report.leaked or (options.strict and report.contaminated):
        raise DataError(f"{options.directory}: validation or benchmark text is in the training text; the list above shows where")
