"""Options of `leaks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from data_pipeline.commands.options.folder import FolderOptions

__all__ = ["LeaksOptions"]


class LeaksOptions(FolderOptions):
    """Looks for validation documents, and items of benchmarks, in the training text."""

    against: Annotated[tuple[Path, ...], Place(metavar="FILE")] = Field((), description="Benchmark files (.jsonl, .txt).")
    strict: bool = Field(False, description="Also fail if an item of a benchmark is found.")
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")
