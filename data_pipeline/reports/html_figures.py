"""Draws the histograms of the page: lengths of documents, and their perplexity under the reference model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from common.html.histogram import Bin, draw_histogram
from common.text import decimal
from data_pipeline.reports.lengths import PERCENTS
from data_pipeline.reports.lookup import part

__all__ = ["length_charts", "perplexity_chart"]

Report = Mapping[str, Any]

_MAX_CUTS = 3  # most sources whose thresholds are marked


def length_charts(report: Report) -> list[Markup]:
    found = {unit: part(report, "lengths", unit) for unit in ("characters", "tokens")}
    return [_length_chart(unit, one) for unit, one in found.items() if one.get("histogram")]


def _length_chart(unit: str, found: Report) -> Markup:
    def words(one: Bin) -> str:
        last = f" to {one.high - 1:,.0f}" if one.high - one.low > 1 else ""
        return f"{one.low:,.0f}{last} {unit}: {one.counts[0]:,} documents, {one.counts[1]:,} {unit}"

    bins = [Bin(low, high, (count, units)) for low, high, count, units in found["histogram"]]
    marks = {f"P{percent}": found[f"p{percent}"] for percent in PERCENTS if f"p{percent}" in found}
    return draw_histogram(bins, ("documents", unit), f"{unit} in a document", marks, words)


def perplexity_chart(report: Report) -> Markup:
    found = part(report, "perplexity")
    if not found.get("histogram"):
        return Markup()

    def words(one: Bin) -> str:
        return f"{decimal(one.low)} to {decimal(one.high)}: {one.counts[0]:,} documents"

    marks: dict[str, float] = {}
    cuts = part(found, "thresholds")
    for key in ("min", "max"):
        values = {name: one[key] for name, one in cuts.items() if key in one}
        if len(set(values.values())) == 1:
            marks[f"{key} {decimal(next(iter(values.values())))}"] = next(iter(values.values()))
        else:
            marks |= {f"{key} {name}": value for name, value in list(values.items())[:_MAX_CUTS]}
    bins = [Bin(low, high, (count,)) for low, high, count in found["histogram"]]
    return draw_histogram(bins, ("documents",), "perplexity of a document", marks, words)
