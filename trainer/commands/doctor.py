"""`doctor`: checks the machine of a training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common.errors import ConfigError
from trainer.commands.options.doctor import DoctorOptions
from trainer.doctor.check import refuse_errors, write_checks
from trainer.doctor.machine import Folders, machine_checks

__all__ = ["run"]


def run(options: DoctorOptions) -> None:
    """Print one row for each check.

    Raises:
        ConfigError: a row is an error.
    """
    if options.log is not None and options.bundle is None:
        raise ConfigError("--log names a file for the archive, and there is none; add --bundle FILE")
    folders = Folders(options.run, options.data, Path(os.environ.get("TMPDIR") or "/tmp"))
    rows = machine_checks(folders, os.environ, fast=options.fast)
    write_checks(rows, sys.stdout, as_json=options.as_json)
    refuse_errors(rows)
