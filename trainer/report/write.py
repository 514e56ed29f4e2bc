"""Writes the reports: reads the runs, puts the pages together, and replaces the files at once or not at all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.files import write_atomic
from trainer.report.charts import main_charts
from trainer.report.comparison import names_of, render_comparison
from trainer.report.png import draw_png
from trainer.report.recorded_run import read_run
from trainer.report.run_page import render_report

__all__ = ["PICTURE", "REPORT", "report_at_end", "write_comparison", "write_report"]

_log = logging.getLogger(__name__)

REPORT, PICTURE = "report.html", "training_metrics.png"
"""The files' names in a run's directory."""


def write_report(run: Path, output: Path | None = None) -> tuple[Path, Path]:
    """Writes the page and the picture, by default into the run's directory.

    Args:
        run: the run's directory.
        output: where the page goes; the picture goes beside it.

    Returns:
        Where they are.

    Raises:
        CheckpointError: the directory holds no run, or a file of it is damaged.
        OSError: a file could not be read or written.
    """
    page = output or run / REPORT
    picture = page.with_name(PICTURE)
    facts = read_run(run)
    write_atomic(page, render_report(facts).encode())
    write_atomic(picture, draw_png(main_charts(facts), facts.name))
    return page, picture


def report_at_end(run: Path) -> None:
    """The same for a training that ends; whatever goes wrong is a warning, for a report must not fail a run."""
    try:
        write_report(run)
    except Exception as error:
        _log.warning("no report of %s was written (%s: %s); python -m trainer report makes it", run, type(error).__name__, error)


def write_comparison(runs: Sequence[Path], output: Path) -> Path:
    """Writes the page that compares runs.

    Raises:
        ConfigError: there are fewer than two, or one is named twice.
        CheckpointError: a directory holds no run, or a file of it is damaged.
        OSError: a file could not be read or written.
    """
    if len(runs) < 2:
        raise ConfigError("compare: name at least two runs")
    names_of(runs)
    write_atomic(output, render_comparison([read_run(run) for run in runs]).encode())
    return output
