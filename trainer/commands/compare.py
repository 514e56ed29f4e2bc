from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Options, Place


class CompareOptions(Options):
    """Writes one page that compares several runs: curves in the same charts, results, and the settings that differ."""

    runs: Annotated[tuple[Path, ...], Place(metavar="RUN", positional=True)] = Field(
        description="Directories of the runs, two or more."
    )
    output: Annotated[Path, Place(metavar="FILE", target="file")] = Field(
        Path("compare.html"), description="File that receives the page."
    )


def run(options: CompareOptions) -> None:
    from trainer.report.write import write_comparison

    print(write_comparison(options.runs, options.output))
