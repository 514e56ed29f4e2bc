"""`report`: writes the report page and the picture of a run."""

from __future__ import annotations

from trainer.commands.inspection.options.report import ReportOptions
from trainer.report import write_report

__all__ = ["run"]


def run(options: ReportOptions) -> None:
    """Write both files and print their paths. Raises the errors of `write_report`."""
    for path in write_report(options.run, options.output):
        print(path)
