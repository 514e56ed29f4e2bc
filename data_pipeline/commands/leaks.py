from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import DataError
from common.settings.model import Place
from data_pipeline.commands.folder_options import FolderOptions
from data_pipeline.config import DedupConfig


class LeaksOptions(FolderOptions):
    """Searches the training text for validation documents and for items of benchmarks."""

    against: Annotated[tuple[Path, ...], Place(metavar="FILE")] = Field(
        (), description="Benchmark files (.jsonl, .txt) to search for."
    )
    strict: bool = Field(False, description="Fail (exit code 3) also if an item of a benchmark is found.")
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")


def run(options: LeaksOptions) -> None:
    from data_pipeline.dataset.locks import reading
    from data_pipeline.dataset.manifest import read_manifest
    from data_pipeline.dataset.splits import SPLITS
    from data_pipeline.dataset.stored_documents import read_documents, settings_in
    from data_pipeline.dedup.leaks import check_leaks

    with reading(options.directory, "leaks"):
        manifest = read_manifest(options.directory)
        settings = settings_in(manifest, "dedup", DedupConfig, benchmarks=())
        train, val = (read_documents(options.directory, manifest, side) for side in SPLITS)
        report = check_leaks(train, val, settings, options.against)
    print(json.dumps(asdict(report), indent=2) if options.as_json else report.describe())
    if report.leaked or (options.strict and report.contaminated):
        raise DataError(f"{options.directory}: validation or benchmark text is in the training text; the list above shows where")
