"""Options of `inspect`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from data_pipeline.commands.options.folder import FolderOptions

__all__ = ["InspectOptions"]


class InspectOptions(FolderOptions):
    """Shows a summary of prepared data, or one document."""

    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")
    document: Annotated[int | None, Place(metavar="ID")] = Field(
        None, description="Id of a document whose text is printed instead of the summary."
    )
