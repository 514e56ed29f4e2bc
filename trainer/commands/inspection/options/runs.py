"""Options of `runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Options, Place

__all__ = ["RunsOptions"]


class RunsOptions(Options):
    """Lists the runs in a folder and in its subfolders, the one that changed last first."""

    folder: Annotated[Path, Place(metavar="DIR", positional=True)] = Field(
        Path("workspace/runs"), description="Folder that holds the runs."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object for each run, one on each line.")
