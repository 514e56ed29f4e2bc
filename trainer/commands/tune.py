from __future__ import annotations

import json
import sys
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from common.terminal import write_line
from trainer.search.options import SearchOptions


class TuneOptions(SearchOptions):
    """Searches for the settings of a recipe with the lowest validation loss. The same command continues a search."""

    as_json: Annotated[bool, Place("--json")] = Field(
        False,
        description="Print one JSON object in place of the path of the best recipe: the path, and the content of trials.json.",
    )


def run(options: TuneOptions) -> None:
    from trainer.search.search import search

    recipe, results = search(options, announce=lambda line: write_line(line, sys.stderr))
    print(json.dumps({"recipe": str(recipe)} | results, ensure_ascii=False) if options.as_json else recipe)
