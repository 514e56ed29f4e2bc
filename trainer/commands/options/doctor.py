"""Options of `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Options, Place

__all__ = ["DoctorOptions"]


class DoctorOptions(Options):
    """Checks this machine: GPUs, driver, memory, disks, network between nodes, versions. Each problem has a remedy."""

    run: Annotated[Path | None, Place(metavar="RUN", variable="TRAIN_RUN")] = Field(
        None, description="Directory of a run, whose disk is checked; with --bundle its record, settings and metrics are added."
    )
    data: Annotated[Path | None, Place(metavar="DATA", variable="TRAIN_DATA")] = Field(
        None, description="Directory of prepared data, whose disk is checked."
    )
    recipe: Annotated[str | None, Place(variable="TRAIN_RECIPE")] = Field(
        None, description="Recipe of a new run, from which the space for its checkpoints is computed. It needs run and data."
    )
    fast: bool = Field(False, description="Skip the checks that take seconds: the all-reduce and the rates of the disks.")
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")
    bundle: Annotated[Path | None, Place(metavar="FILE", target="file")] = Field(
        None, description="Also write an archive (.tar.gz) for a bug report, with typed facts alone: no texts, secrets and names."
    )
    log: Annotated[Path | None, Place(metavar="FILE")] = Field(
        None, description="File with the output of a training. --bundle adds the messages of this program in it to the archive."
    )
