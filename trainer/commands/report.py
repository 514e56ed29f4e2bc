"""`report`: writes the page and the picture of a run."""

from __future__ import annotations

from trainer.commands.options.report import ReportOptions
from trainer.report import write_report

__all__ = ["run"]


def run(options: ReportOptions) -> None:
    """Writes both and prints their paths; raises as `write_report` does."""
    for path in write_report(options.run, options.output):
        print(path)
