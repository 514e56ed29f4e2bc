"""`doctor`: checks the machine of a training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common.errors import ConfigError
from trainer.commands.options.doctor import DoctorOptions
from trainer.doctor.bundle import check_place, read_contents, write_bundle
from trainer.doctor.check import refuse_errors, write_checks
from trainer.doctor.machine import Folders, machine_checks
from trainer.machine.environment import environment_facts
from trainer.run.events import parse_event

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
    folders = Folders(options.run, options.data, Path(os.environ.get("TMPDIR") or "/tmp"))
    rows = machine_checks(folders, os.environ, fast=options.fast)
    write_checks(rows, sys.stdout, as_json=options.as_json)
    if options.bundle is not None:
        listed = write_bundle(options.bundle, rows, environment_facts(), contents)
        print("\n".join((f"{options.bundle} holds:", *(f"  {line}" for line in listed))), file=sys.stderr)
    refuse_errors(rows)
