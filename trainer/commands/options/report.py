"""Options of `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from trainer.commands.options.saved_run import RunOptions

__all__ = ["ReportOptions"]


class ReportOptions(RunOptions):
    """Writes report.html and training_metrics.png of a run, finished or not, into its directory."""

    output: Annotated[Path | None, Place(metavar="FILE")] = Field(
        None, description="Write the page to this file instead, and the picture beside it."
    )
