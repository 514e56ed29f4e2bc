from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import PreparedDataError
from common.text import share, size, visible
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports.data_card import render_card
from data_pipeline.reports.html_page import render_report
from data_pipeline.reports.lengths import truncation_advice
from data_pipeline.reports.lookup import by_extension, known, largest_first, lookup

_WORDS = ("split", "source", "label", "kind", "stage", "reason", "ignored", "extension", "language", "length", "packing")
"""Columns that contain text."""
_COLUMNS = 100


def summarise(manifest: Manifest) -> dict[str, Any]:
    totals = manifest.totals
    tokens = lookup(totals, "lengths", "tokens").get("total", 0)
    return {
        "root_digest": manifest.root_digest,
        "row_length": manifest.row_length,
        "tokenizer": {
            "kind": manifest.tokenizer_kind,
            "vocab_size": manifest.vocab_size,
            "digest": manifest.tokenizer_digest,
            "bytes_per_token": round(lookup(totals, "documents").get("text_bytes", 0) / max(tokens, 1), 3),
        },
        "shards": [
            {
                "split": split,
                "source": source,
                "shards": len(shards),
                **{name: sum(getattr(shard, name) for shard in shards) for name in ("rows", "tokens", "targets", "bytes")},
            }
            for split in ("train", "val")
            for source in manifest.sources
            if (shards := [shard for shard in manifest.shards if (shard.split, shard.source) == (split, source)])
        ],
        "advice": truncation_advice(totals.get("truncation") or [], manifest.row_length),
        "totals": totals,
    }


@contextmanager
def malformed(directory: Path) -> Iterator[None]:
    """PreparedDataError for errors while a report is rendered, because its values can have any JSON type."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise PreparedDataError(
            f"{directory / MANIFEST}: its settings (`config`) or its report (`totals`) are malformed "
            f"({type(error).__name__}: {visible(str(error))}); run `prepare` again"
        ) from None


def check_report(directory: Path, manifest: Manifest) -> None:
    with malformed(directory):
        describe(summarise(manifest))
        render_report(manifest, {})
        render_card(manifest)


def describe(summary: dict[str, Any]) -> str:
    totals, tokenizer = known(summary["totals"]), summary["tokenizer"]
    head = [
        f"root digest  {summary['root_digest']}",
        f"tokenizer    {tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, {tokenizer['bytes_per_token']} bytes per token",
        f"rows         {summary['row_length']:,} tokens long",
        *_duplicates(lookup(totals, "duplicates")),
    ]
    counts = lookup(totals, "documents")
    if {"read", "train", "val", "rejected"} <= counts.keys():
        kept = f"{counts['train']:,} train + {counts['val']:,} val"
        head.insert(3, f"documents    {counts['read']:,} read = {kept} + {counts['rejected']:,} rejected")
    ignored = [{"ignored": reason, "extension": name, "files": count} for reason, name, count in by_extension(totals, "ignored")]
    tables = [
        _table(summary["shards"], ("split", "source", "shards", "rows", "tokens", "targets", "bytes")),
        _table(_named("label", lookup(totals, "labels", "documents")), ("label", "train", "val")),
        _table(_rejected(totals), ("stage", "reason", "documents", "share")),
        _table(ignored, ("ignored", "extension", "files")),
        _table(_sources(totals), ("source", "kind", "read", "kept", "text", "tokens", "bytes_per_token", "train_tokens", "share")),
        _table(
            _named("language", largest_first(lookup(totals, "languages"), "bytes")),
            ("language", "documents", "bytes", "tokens", "bytes_per_token"),
        ),
        _table(_named("length", lookup(totals, "lengths")), ("length", "mean", "p50", "p90", "p95", "p99", "max")),
        textwrap.fill(summary["advice"], _COLUMNS),
        _table(
            _named("split", lookup(totals, "rows")),
            ("split", "rows", "loss_share", "fill_rate", "padding", "documents", "cut_documents", "cut_rate", "repeated_tokens"),
        ),
        _table(_named("packing", lookup(totals, "packing_methods")), ("packing", "fill_rate", "cut_rate")),
    ]
    return "\n\n".join(("\n".join(head), *filter(None, tables)))


def _duplicates(found: dict[str, Any]) -> Iterator[str]:
    if found:
        words = ", ".join(f"{found[name]:,} {name}" for name in ("exact", "near", "benchmark") if name in found)
        yield f"duplicates   {words}"
    for source in found.get("alarms") or ():
        yield f"alarm        {visible(source)} lost a larger share of its documents to duplicates than dedup.alarm_fraction"
    for source in found.get("benchmark_alarms") or ():
        yield f"alarm        {visible(source)} lost a larger share of its text to benchmarks than dedup.benchmark_alarm_fraction"


def _rejected(totals: dict[str, Any]) -> list[dict[str, Any]]:
    read = max(lookup(totals, "documents").get("read", 0), 1)
    return [
        {"stage": stage, "reason": reason, "documents": count, "share": share(count / read)}
        for stage, counts in lookup(totals, "rejected").items()
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _sources(totals: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **line,
            **{name: value for name, value in lookup(line, "documents").items() if name in ("read", "kept")},
            "text": size(lookup(line, "documents").get("text_bytes", 0)),
            "share": share(line["share"]) if "share" in line else "",
        }
        for line in _named("source", lookup(totals, "sources"))
    ]


def _named(title: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{title: name, **entry} for name, entry in values.items()]


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    shown = [column for column in columns if any(row.get(column) not in (None, "") for row in rows)]
    cells = [[column.replace("_", " ") for column in shown]]
    cells += [[_cell(row.get(column)) for column in shown] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(shown))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in _WORDS else cell.rjust(width)
            for cell, width, column in zip(line, widths, shown, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join(lines) if rows else ""


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}"
    return " ".join(visible(str(value if value is not None else "")).split())
