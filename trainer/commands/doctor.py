"""`doctor`: checks the machine of a training."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from common.errors import ConfigError, ProjectError
from common.files import UnusableFileError
from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.dataset.manifest import read_manifest
from trainer.commands.options.doctor import DoctorOptions
from trainer.config import TrainConfig
from trainer.doctor.bundle import check_place, read_contents, write_bundle
from trainer.doctor.check import refuse_errors, write_checks
from trainer.doctor.machine import Folders, machine_checks
from trainer.machine.environment import environment_facts
from trainer.planning.checkpoints import space_needed
from trainer.runs.events import parse_event
from trainer.runs.saved_run import load_config

__all__ = ["run"]


def run(options: DoctorOptions) -> None:
    """Print one row for each check.

    Raises:
        ConfigError: a row is an error, or the archive cannot have its name.
        OSError, UnusableFileError: the log cannot be read, or the archive cannot be written.
    """
    if options.log is not None and options.bundle is None:
        raise ConfigError("--log adds lines to the archive of --bundle, which is not set; add --bundle FILE, or leave out --log")
    if options.bundle is not None:
        check_place(options.bundle)
    contents = read_contents(options.run if options.bundle is not None else None, options.log, parse_event)
    folders = Folders(options.run, options.data, Path(os.environ.get("TMPDIR") or "/tmp"), _space_needed(options))
    rows = machine_checks(folders, os.environ, fast=options.fast)
    write_checks(rows, sys.stdout, as_json=options.as_json)
    if options.bundle is not None:
        listed = write_bundle(options.bundle, rows, environment_facts(), contents)
        print("\n".join((f"{options.bundle} holds:", *(f"  {line}" for line in listed))), file=sys.stderr)
    refuse_errors(rows)


def _space_needed(options: DoctorOptions) -> tuple[int, int] | None:
    """Return the free bytes that the run needs; None if its settings or its data are not known."""
    if options.run is None or options.data is None:
        return None
    with suppress(ProjectError, UnusableFileError, OSError):
        if (options.run / "config.toml").is_file():
            config = load_config(options.run)
        elif options.recipe:
            words = ["--run", str(options.run), "--data", str(options.data), "--recipe", options.recipe]
            config = load_settings(TrainConfig, words, help_parser(TrainConfig, "trainer train", ""))
        else:
            return None
        own = config.model_copy(update={"precision": "fp32"})  # a checkpoint has fp32 weights in every format
        return space_needed(own, read_manifest(options.data).vocab_size)
    return None
