"""`tune`: searches for the best settings of a recipe."""

from __future__ import annotations

import json
import sys

from common.terminal_lines import write_line
from trainer.commands.options.tune import TuneOptions
from trainer.search.search import search

__all__ = ["run"]


def run(options: TuneOptions) -> None:
    """Print a line for each trial on stderr, and at the end the path of the best recipe or a JSON object.

    Raises:
        ProjectError: see `search`.
    """
    recipe, results = search(options, announce=lambda line: write_line(line, sys.stderr))
    print(json.dumps({"recipe": str(recipe)} | results, ensure_ascii=False) if options.as_json else recipe)
