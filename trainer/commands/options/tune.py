"""Options of `tune`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from trainer.search.options import SearchOptions

__all__ = ["TuneOptions"]


class TuneOptions(SearchOptions):
    """Searches for the settings of a recipe with the lowest validation loss. The same command continues a search."""

    as_json: Annotated[bool, Place("--json")] = Field(
        False,
        description="Print one JSON object in place of the path of the best recipe: the path, and the content of trials.json.",
    )
