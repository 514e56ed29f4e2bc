"""Pictures for TensorBoard, as arrays of (height, width, 3) bytes, made without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trainer.runs.events import Score
from trainer.runs.metric import encodable

__all__ = ["Picture", "confusion_picture", "length_histogram", "perplexity_bars"]

Picture = NDArray[np.uint8]
_BLUE, _ORANGE = "#3465a4", "#ce5c00"
_MOST_BARS = 40
_LONGEST_NAME = 40
_MOST_LABELS, _MOST_NUMBERS = 40, 20
"""Labels in a picture of a confusion, and labels up to which it shows the counts."""
_DARK = 0.5
_CHARACTER = 0.09
"""Width of a character of ten points, in inches."""


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
    names = [_literal(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…") for name, _ in shown]
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
    """Return a table of the share of each true label's documents that each label is predicted for.

    If there are too many labels for one picture, those with the most documents are shown.
    """
    totals = {name: sum(row.values()) for name, row in counts.items()}
    for name in {name for row in counts.values() for name in row}:
        totals.setdefault(name, 0)
    names = sorted(sorted(totals, key=lambda name: -totals[name])[:_MOST_LABELS])
    shares = np.array([[counts.get(true, {}).get(name, 0) / max(1, totals[true]) for name in names] for true in names])
    shown = [_literal(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…") for name in names]
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
