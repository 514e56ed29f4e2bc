"""`compare`: writes one page about several runs."""

from __future__ import annotations

from trainer.commands.options.compare import CompareOptions
from trainer.report import write_comparison

__all__ = ["run"]


def run(options: CompareOptions) -> None:
    """Writes the page and prints its path; raises as `write_comparison` does."""
    print(write_comparison(options.runs, options.output))
