"""`tune`: searches for the best settings of a recipe."""

from __future__ import annotations

import sys

from common.terminal_lines import write_line
from trainer.commands.options.tune import TuneOptions
from trainer.search.search import search

__all__ = ["run"]


def run(options: TuneOptions) -> None:
    """Print a line for each trial on stderr, and at the end the path of the best recipe. Raises the errors of `search`."""
    print(search(options, announce=lambda line: write_line(line, sys.stderr)))
