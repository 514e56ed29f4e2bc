"""The templates of the pages about runs, and their filters for numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.html.chart import measured
from common.html.line_chart import draw
from common.html.page import or_unknown, template_environment
from common.text import count, duration, rate, share, size
from common.untrusted import number
from trainer.report.differences import worded
from trainer.report.recorded_run import part
from trainer.report.results import STATUS

__all__ = ["TEMPLATES"]


def _written(form: Callable[[float], str]) -> Callable[[object], str]:
    """Return a filter for values from JSON. It writes a dash for a value that is missing or not a number."""
    return lambda value: or_unknown(form)(number(value))


TEMPLATES = template_environment(
    Path(__file__).parent,
    count=_written(count),
    decimal=_written(measured),
    duration=duration,
    rate=_written(rate),
    share=_written(share),
    size=_written(size),
    status=lambda status: STATUS.get(status, status),
    worded_items=lambda values: [(name, worded(value)) for name, value in values.items()],
)
TEMPLATES.globals.update(draw=draw, part=part)
