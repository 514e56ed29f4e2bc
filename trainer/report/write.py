"""Writes the reports. Each file is replaced atomically."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from common.command_line import command_text
from common.errors import ConfigError
from common.files import write_atomic
from trainer.report.charts import main_charts
from trainer.report.comparison import names_of, render_comparison
from trainer.report.pictures import draw_png
from trainer.report.recorded_run import read_run
from trainer.report.run_page import render_report

_log = logging.getLogger(__name__)

REPORT, PICTURE = "report.html", "training_metrics.png"


def write_report(run: Path, output: Path | None = None) -> tuple[Path, Path]:
    page = output or run / REPORT
    picture = page.with_name(PICTURE)
    facts = read_run(run)
    write_atomic(page, render_report(facts).encode())
    write_atomic(picture, draw_png(main_charts(facts), facts.name))
    return page, picture


def report_at_end(run: Path) -> None:
    """Write the report at the end of a training. An error is only logged, because a report must not fail a run."""
    if not run.is_dir():
        return  # the folder was deleted, which another message says
    try:
        write_report(run)
    except Exception as error:
        again = command_text("report", run)
        _log.warning("cannot write the report of %s (%s: %s); `%s` writes it", run, type(error).__name__, error, again)


def write_comparison(runs: Sequence[Path], output: Path) -> Path:
    if len(runs) < 2:
        raise ConfigError("compare: fewer than two runs are named; name at least two")
    names_of(runs)
    write_atomic(output, render_comparison([read_run(run) for run in runs]).encode())
    return output
