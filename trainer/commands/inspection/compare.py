"""`compare`: writes one page about several runs."""

from __future__ import annotations

from trainer.commands.inspection.options.compare import CompareOptions
from trainer.report import write_comparison

__all__ = ["run"]


def run(options: CompareOptions) -> None:
    """Write the page and print its path. Raises the errors of `write_comparison`."""
    print(write_comparison(options.runs, options.output))
