from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import ConfigError, ProjectError
from common.files import UnusableFileError
from common.settings.load import load_settings
from common.settings.model import Options, Place
from common.settings.options import help_parser
from trainer.config import TrainConfig
from trainer.runs.layout import CONFIG


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


def run(options: DoctorOptions) -> None:
    from trainer.doctor.bundle import check_place, read_contents, write_bundle
    from trainer.doctor.check import refuse_errors, write_checks
    from trainer.doctor.machine import Folders, machine_checks
    from trainer.machine.environment import environment_facts

    if options.log is not None and options.bundle is None:
        raise ConfigError("--log adds lines to the archive of --bundle, which is not set; add --bundle FILE, or leave out --log")
    if options.bundle is not None:
        check_place(options.bundle)
    contents = read_contents(options.run if options.bundle is not None else None, options.log)
    folders = Folders(options.run, options.data, Path(os.environ.get("TMPDIR") or "/tmp"), _space_needed(options))
    rows = machine_checks(folders, os.environ, fast=options.fast)
    write_checks(rows, sys.stdout, as_json=options.as_json)
    if options.bundle is not None:
        listed = write_bundle(options.bundle, rows, environment_facts(), contents)
        print("\n".join((f"{options.bundle} holds:", *(f"  {line}" for line in listed))), file=sys.stderr)
    refuse_errors(rows)


def _space_needed(options: DoctorOptions) -> tuple[int, int] | None:
    from data_pipeline.dataset.manifest import read_manifest
    from trainer.planning.checkpoints import space_needed
    from trainer.runs.saved_run import SavedRun

    if options.run is None or options.data is None:
        return None
    with suppress(ProjectError, UnusableFileError, OSError):
        if (options.run / CONFIG).is_file():
            config = SavedRun(options.run).config
        elif options.recipe:
            words = ["--run", str(options.run), "--data", str(options.data), "--recipe", options.recipe]
            config = load_settings(TrainConfig, words, help_parser(TrainConfig, "trainer train", ""))
        else:
            return None
        own = config.model_copy(update={"precision": "fp32"})  # a checkpoint has fp32 weights in every format
        return space_needed(own, read_manifest(options.data).vocab_size)
    return None
