from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from trainer.commands.run_options import RunOptions


class ReportOptions(RunOptions):
    """Writes report.html and training_metrics.png of a run into its directory. The run need not be finished."""

    output: Annotated[Path | None, Place(metavar="FILE", target="file")] = Field(
        None,
        description="File that receives the page. Without it, report.html in the run. The picture goes into the same directory.",
    )


def run(options: ReportOptions) -> None:
    from trainer.report.write import write_report

    for path in write_report(options.run, options.output):
        print(path)
