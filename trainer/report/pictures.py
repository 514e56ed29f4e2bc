"""`training_metrics.png`: the four main charts in one picture. It uses no global state of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from common.html.chart import Chart, short
from common.text import shortened, visible
from trainer.runs.events import Score
from trainer.runs.metric import encodable

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
    bad = np.concatenate([line.thinned.x_C[line.thinned.bad_C > 0] for line in chart.shown])
    if len(bad):
        top, crosses = axes.get_xaxis_transform(), np.ones(len(bad))
        axes.plot(bad, crosses, "x", transform=top, color=_COLOURS[1], clip_on=False, label="not a finite number")
    if len(chart.shown) > 1:
        axes.legend(fontsize=8, frameon=False)


def _plain(words: str) -> str:
    """Escape text for matplotlib: a dollar sign begins a formula, and a character that the font lacks raises a warning."""
    return visible(words).replace("$", r"\$").encode("ascii", "replace").decode()


Picture = NDArray[np.uint8]
_BLUE, _ORANGE = "#3465a4", "#ce5c00"
_MOST_BARS = 40
_LONGEST_NAME = 40
_MOST_LABELS, _MOST_NUMBERS = 40, 20  # labels in a picture of a confusion, and labels up to which it shows the counts
_DARK = 0.5
_CHARACTER = 0.09


def length_histogram(report: Mapping[str, Any]) -> Picture | None:
    """Return a histogram of the documents' lengths in tokens, by documents and by tokens; None if the report has no lengths."""
    lengths = (report.get("lengths") or {}).get("tokens") or {}
    bins = np.array(lengths.get("histogram") or [], dtype=np.float64)
    if not bins.size or not bins[:, 2:].sum(axis=0).all():
        return None
    low, high, documents, tokens = bins.T
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.bar(low, documents / documents.sum(), high - low, align="edge", color=_BLUE, label="documents")
    axes.step(np.append(low, high[-1]), np.append(tokens, tokens[-1]) / tokens.sum(), where="post", color=_ORANGE, label="tokens")
    marks = {name: lengths[name] for name in ("p50", "p99") if lengths.get(name) is not None}
    for name, length in marks.items():
        axes.axvline(length, color="grey", linewidth=1, linestyle=":")
        axes.annotate(f" {name.upper()} {length:,}", (length, axes.get_ylim()[1]), va="top", fontsize=8)
    axes.set(xlabel="length of a document, tokens", ylabel="share", title="Length of the documents")
    axes.legend(frameon=False)
    return _drawn(figure)


def perplexity_bars(scores: Mapping[str, Score], title: str) -> Picture:
    """Return bars of the perplexity of each group, in their order; only the highest if there are too many for one picture."""
    shown = list(scores.items())
    if len(shown) > _MOST_BARS:
        shown = sorted(shown, key=lambda item: -item[1].loss)[:_MOST_BARS]
    values = [np.nan if score.perplexity is None else score.perplexity for _, score in shown]
    heights = [value if np.isfinite(value) else 0.0 for value in values]
    names = [_literal(shortened(name, _LONGEST_NAME)) for name, _ in shown]
    labels = [f"{value:.4g}  ({score.num_targets:,} targets)" for value, (_, score) in zip(values, shown, strict=True)]
    width, height = 8.0, 1 + 0.35 * len(shown)
    left = 0.3 + _CHARACTER * max(map(len, names))
    bars_width = width - 0.2 - left
    label_width = 0.1 + 0.8 * _CHARACTER * max(map(len, labels))
    figure = Figure(figsize=(width, height))  # no layout engine, because it draws every text twice
    axes = figure.add_axes((left / width, 0.55 / height, bars_width / width, 1 - 0.9 / height))
    bars = axes.barh(range(len(shown)), heights, color=_BLUE)
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(*heights, 1.0) / (1 - label_width / bars_width))
    axes.set(xlabel="perplexity", title=title)
    return _drawn(figure)


def confusion_picture(counts: Mapping[str, Mapping[str, int]], title: str) -> Picture:
    totals = {name: sum(row.values()) for name, row in counts.items()}
    for name in {name for row in counts.values() for name in row}:
        totals.setdefault(name, 0)
    names = sorted(sorted(totals, key=lambda name: -totals[name])[:_MOST_LABELS])
    shares = np.array([[counts.get(true, {}).get(name, 0) / max(1, totals[true]) for name in names] for true in names])
    shown = [_literal(shortened(name, _LONGEST_NAME)) for name in names]
    side = 2.5 + 0.45 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= _MOST_NUMBERS:
        for row, true in enumerate(names):
            for column, name in enumerate(names):
                count = counts.get(true, {}).get(name, 0)
                colour = "white" if shares[row, column] > _DARK else "black"
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(names)), shown, rotation=90)
    axes.set_yticks(range(len(names)), shown)
    axes.set(xlabel="predicted label", ylabel="true label", title=title)
    return _drawn(figure)


def _literal(name: str) -> str:
    """Return the name for matplotlib: with escaped dollars, which would start a formula, and without lone surrogates."""
    return encodable(name).replace("$", r"\$")


def _drawn(figure: Figure) -> Picture:
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
