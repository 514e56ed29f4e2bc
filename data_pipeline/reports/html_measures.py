"""The sections about what was measured: lengths, quality, tokens and rows."""

from __future__ import annotations

from typing import Any

from common.html.histogram import Bin, draw_histogram
from common.text import decimal
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports.html_cells import NOTHING, Report, count_of, decimal_of, exact_share_of, flat, listed, share_of
from data_pipeline.reports.html_parts import Html, definitions, element, join, note, number_table
from data_pipeline.reports.lengths import PERCENTS, truncation_advice
from data_pipeline.reports.lookup import part, round_trip

__all__ = ["lengths", "quality", "rows", "tokenizer"]


def lengths(report: Report, row_length: int) -> Html:
    """Histograms and percentiles in characters and tokens, and what each length of row would do to the documents."""
    found = {unit: part(report, "lengths", unit) for unit in ("characters", "tokens")}
    charts = [_length_chart(unit, one) for unit, one in found.items() if one.get("histogram")]
    if not charts:
        return NOTHING
    names = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")
    table = number_table(
        ("a document's length in", *(name.upper() if name[1:].isdecimal() else name for name in names)),
        ((unit, *(decimal_of(one, name) for name in names)) for unit, one in found.items() if one),
    )
    return join((element("div", *charts, class_="pair"), table, _truncation(report.get("truncation") or [], row_length)))


def _length_chart(unit: str, found: Report) -> Html:
    def words(one: Bin) -> str:
        last = f" to {one.high - 1:,.0f}" if one.high - one.low > 1 else ""
        return f"{one.low:,.0f}{last} {unit}: {one.counts[0]:,} documents, {one.counts[1]:,} {unit}"

    bins = [Bin(low, high, (count, units)) for low, high, count, units in found["histogram"]]
    marks = {f"P{percent}": found[f"p{percent}"] for percent in PERCENTS if f"p{percent}" in found}
    return draw_histogram(bins, ("documents", unit), f"{unit} in a document", marks, words)


def _truncation(truncation: list[dict[str, Any]], row_length: int) -> Html:
    if not truncation:
        return NOTHING
    table = number_table(
        ("row length", "documents longer", "share", "tokens kept if truncated", "filled with one document per row"),
        (
            (
                element("span", f"{row['row_length']:,}" + (" (set)" if row["row_length"] == row_length else "")),
                count_of(row, "documents_cut"),
                share_of(row, "cut_rate"),
                share_of(row, "kept_rate"),
                share_of(row, "one_per_row_fill"),
            )
            for row in truncation
        ),
        marked=next((index for index, row in enumerate(truncation) if row["row_length"] == row_length), None),
    )
    return join((element("h3", "Choosing the row length"), note(truncation_advice(truncation, row_length)), table))


def quality(report: Report) -> Html:
    """Perplexity under the reference model, with the cuts; and the classifier."""
    found, classifier = part(report, "perplexity"), part(report, "classifier")
    parts = []
    if found.get("histogram"):
        parts.append(element("div", _perplexity_chart(found), class_="pair"))
    if by_source := part(found, "by_source"):
        cuts = part(found, "thresholds")
        lines = (
            (
                name,
                *(decimal_of(one, key) for key in ("p5", "p50", "p95")),
                *(decimal_of(part(cuts, name), key) for key in ("min", "max")),
            )
            for name, one in listed(by_source).items()
        )
        parts.append(number_table(("source", "P5", "P50", "P95", "lowest kept", "highest kept"), lines, title="Perplexity"))
    if classifier:
        parts += [element("h3", "Classifier"), definitions({name.replace("_", " "): value for name, value in flat(classifier)})]
    return join(parts)


def _perplexity_chart(found: Report) -> Html:
    def words(one: Bin) -> str:
        return f"{decimal(one.low)} to {decimal(one.high)}: {one.counts[0]:,} documents"

    marks: dict[str, float] = {}
    cuts = part(found, "thresholds")
    for key in ("min", "max"):
        values = {name: one[key] for name, one in cuts.items() if key in one}
        if len(set(values.values())) == 1:
            marks[f"{key} {decimal(next(iter(values.values())))}"] = next(iter(values.values()))
        else:
            marks |= {f"{key} {name}": value for name, value in list(values.items())[:3]}
    bins = [Bin(low, high, (count,)) for low, high, count in found["histogram"]]
    return draw_histogram(bins, ("documents",), "perplexity of a document", marks, words)


def rows(report: Report, method: str | None) -> Html:
    """How full the rows are and what was cut, and how the other methods of packing would have done."""
    names = ("rows", "tokens", "targets", "padding", "fill_rate", "documents", "cut_documents", "cut_rate", "repeated_tokens")
    parts = []
    if found := part(report, "rows"):
        parts.append(
            number_table(
                ("split", *(name.replace("_", " ") for name in names)),
                (
                    (split, *(share_of(one, name) if name.endswith("_rate") else count_of(one, name) for name in names))
                    for split, one in found.items()
                ),
            )
        )
    if methods := part(report, "packing_methods"):
        parts.append(
            number_table(
                ("method", "filled", "documents cut"),
                (
                    (f"{name} (set)" if name == method else name, exact_share_of(one, "fill_rate"), share_of(one, "cut_rate"))
                    for name, one in methods.items()
                ),
                marked=next((index for index, name in enumerate(methods) if name == method), None),
                title="The same documents packed in other ways",
            )
        )
    return join(parts)


def tokenizer(report: Report, manifest: Manifest) -> Html:
    """Which tokenizer it is, whether it gives every text back, and whether validation is free of training text."""
    found, leaks = part(report, "tokenizer"), part(report, "leaks")
    shown: dict[str, object] = {
        "tokenizer": f"{manifest.tokenizer_kind}, {manifest.vocab_size:,} tokens, stored as {manifest.token_type}",
        "digest": element("code", manifest.tokenizer_digest),
    }
    if words := round_trip(found):
        shown["round trip"] = words
    if leaks:
        shown["leaks"] = (
            ", ".join(f"{count:,} {kind}" for kind, count in leaks.items()) + " copies of validation documents in training"
        )
    alarm = note("Documents of the validation side are in training, too; its loss will look too good.", alarm=True)
    return join((definitions(shown), alarm if any(leaks.values()) else ""))
