"""Options of `inspect`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from data_pipeline.commands.options.folder import FolderOptions

__all__ = ["InspectOptions"]


class InspectOptions(FolderOptions):
    """Shows what is in prepared data."""

    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")
    document: Annotated[int | None, Place(metavar="ID")] = Field(
        None, description="Print one document instead, by its id, as in the documents of the rows."
    )
