"""`training_metrics.png`: the four main charts in one picture. It uses no global state of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from common.html.chart import Chart, Line, short
from common.text import visible

__all__ = ["draw_png"]

# Okabe and Ito, Color Universal Design, 2008. The background is white and opaque, so that the picture is legible on any page.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1f2529")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1)))
_MARKERS = ("o", "s", "^")
_QUIET, _RULE = "#5c676f", "#d9dddf"
_MAX_MARKERS = 40


def draw_png(charts: Sequence[Chart], title: str) -> bytes:
    """Draw the charts in two columns. Return the bytes of a PNG of 1600 pixels' width."""
    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(10, 3.2 * rows + 0.4), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(title), fontsize=12, fontweight="bold")
    for place, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, 2, place + 1), chart)
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # without the version, the bytes are equal on all machines
    return file.getvalue()


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(_plain(chart.title), fontsize=10, loc="left")
    axes.set_xlabel(_plain(chart.along), fontsize=8, color=_QUIET)
    axes.set_ylabel(_plain(chart.unit) + " (log)" * chart.y.log, fontsize=8, color=_QUIET)
    axes.tick_params(labelsize=8, colors=_QUIET)
    axes.grid(visible=True, color=_RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_QUIET)
    if not chart.shown:
        axes.text(0.5, 0.5, "no values yet", transform=axes.transAxes, ha="center", va="center", fontsize=9, color=_QUIET)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if chart.y.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(chart.x.low, chart.x.high)
    axes.set_ylim(chart.y.low, chart.y.high)
    axes.set_xticks(chart.x.ticks)
    axes.set_yticks(chart.y.ticks)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _place: short(value)))
    for line in chart.shown:
        _line(axes, line)
    _bad_marks(axes, chart.shown)
    if len(chart.shown) > 1:
        axes.legend(fontsize=8, frameon=False)


def _line(axes: Axes, line: Line) -> None:
    found, colour = line.thinned, _COLOURS[line.look % len(_COLOURS)]
    if not found.whole:
        axes.fill_between(found.x_C, found.low_C, found.high_C, color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        found.x_C,
        found.mean_C,
        color=colour,
        linewidth=0.8 if line.faint else 1.6,
        alpha=0.6 if line.faint else 1.0,
        linestyle="-" if line.faint else _DASHES[line.look % len(_DASHES)],
        marker=_MARKERS[line.look % len(_MARKERS)] if line.points and len(found.x_C) <= _MAX_MARKERS else None,
        markersize=4,
        label=_plain(line.name),
    )


def _bad_marks(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw crosses at the upper edge for values that are not finite."""
    places = np.concatenate([line.thinned.x_C[line.thinned.bad_C > 0] for line in lines])
    if len(places):
        height = axes.get_xaxis_transform()
        axes.plot(
            places, np.ones(len(places)), "x", transform=height, color=_COLOURS[1], clip_on=False, label="not a finite number"
        )


def _plain(words: str) -> str:
    """Escape text for matplotlib: a dollar sign begins a formula, and a character that the font lacks raises a warning."""
    return visible(words).replace("$", r"\$").encode("ascii", "replace").decode()
