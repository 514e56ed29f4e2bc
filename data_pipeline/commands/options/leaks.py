"""Options of `leaks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from data_pipeline.commands.options.folder import FolderOptions

__all__ = ["LeaksOptions"]


class LeaksOptions(FolderOptions):
    """Searches the training text for validation documents and for items of benchmarks."""

    against: Annotated[tuple[Path, ...], Place(metavar="FILE")] = Field(
        (), description="Benchmark files (.jsonl, .txt) to search for."
    )
    strict: bool = Field(False, description="Fail (exit code 3) also if an item of a benchmark is found.")
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")
