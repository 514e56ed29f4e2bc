"""What commands print about prepared data: the summary at the end of `prepare`, and the tables of `inspect`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.command_line import command_text
from common.errors import PreparedDataError
from common.files import UnusableFileError, read_input
from common.settings.dotted import parse_toml
from common.settings.load import AUTO, MAX_SETTINGS_BYTES, recipe_path
from common.text import columns, share, size, visible
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.layout import MANIFEST, TOKENIZER
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports.facts import by_extension, known, largest_first, lookup, truncation_advice
from data_pipeline.reports.pages import render_card, render_report
from data_pipeline.sources.formats import IgnoredReason

_SHOWN = 6  # the most reasons or extensions in a line
_FIRST_STEPS = 1000  # steps of the suggested training, if the recipe does not limit it
_LENGTHS = ("steps", "epochs", "tokens")
_WORDS = ("split", "source", "label", "kind", "stage", "reason", "ignored", "extension", "language", "length", "packing")
"""Columns that contain text."""
_COLUMNS = 100


def summary_lines(manifest: Manifest, config: PrepareConfig) -> list[str]:
    totals = manifest.totals
    documents, tokens = lookup(totals, "documents"), sum(shard.tokens for shard in manifest.shards)
    rows = {split: sum(shard.rows for shard in manifest.shards if shard.split == split) for split in ("train", "val")}
    per_token = documents.get("text_bytes", 0) / max(lookup(totals, "lengths", "tokens").get("total", 0), 1)
    rejected = [item for reasons in lookup(totals, "rejected").values() for item in reasons.items()]
    lines = {
        "documents": f"{documents.get('read', 0):,} read: {documents.get('train', 0):,} for training, "
        f"{documents.get('val', 0):,} for validation",
        "tokens": f"{tokens:,} ({per_token:.2f} bytes each) in {rows['train']:,} training and {rows['val']:,} validation rows of "
        f"{manifest.row_length:,}",
        "rejected": _counted(dict(rejected), "document"),
    }
    if "ignored" in totals:  # data of older versions does not count ignored files
        ignored: Counter[str] = Counter()
        for reason, extension, number in by_extension(totals, "ignored"):
            is_format = reason in (IgnoredReason.UNKNOWN_FORMAT, IgnoredReason.UNKNOWN_MEMBER)
            ignored[extension if is_format else f"{extension} {reason}"] += number
        lines["ignored"] = _counted(ignored, "file")
    lines["next"] = next_command(manifest, config)
    return [f"{name:<9}  {visible(text)}" for name, text in lines.items()]


def next_command(manifest: Manifest, config: PrepareConfig) -> str:
    """Return the command that trains on the data: the recipe, or `auto` without one, and what the recipe does not set.

    The run is the one whose tokenizer the data has; RUN if preference pairs have another tokenizer.
    """
    recipe = config.recipe or AUTO
    settings = {} if recipe == AUTO else _training_settings(recipe)
    run = Path("runs") / config.output.absolute().name
    number = 1
    while run.exists():
        number += 1
        run = run.with_name(f"{config.output.absolute().name}-{number}")
    words: list[object] = ["--data", config.output, "--run", run, "--recipe", recipe]
    objective = "preference" if manifest.has_pairs else "classification" if lookup(manifest.totals, "labels") else None
    if objective is not None and "objective" not in settings:
        words += ["--objective", objective]
    tokenizer = config.tokenizer.path
    folders = [] if tokenizer is None else [tokenizer, *([tokenizer.parent] if tokenizer.name == TOKENIZER else [])]
    of_run = next((folder for folder in folders if (folder / "record.json").is_file()), None)
    initial = of_run or ("RUN" if manifest.has_pairs else None)
    if initial is not None and "init" not in settings:
        words += ["--init", initial]
    sources = [settings] if initial is None else [settings, _training_settings(f"{initial}/config.toml")]
    contexts = [value for one in sources if isinstance(value := lookup(one, "model").get("context"), int)]
    if (recipe != AUTO or initial is not None) and max(contexts, default=0) < manifest.row_length:  # `auto` chooses it
        words += ["--model.context", manifest.row_length]
    if recipe != AUTO and lookup(settings, "limits").keys().isdisjoint(_LENGTHS):
        words += ["--limits.steps", _FIRST_STEPS]
    return command_text("train", *words)


def _training_settings(recipe: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, UnusableFileError):
        return lookup(parse_toml(read_input(recipe_path(recipe), MAX_SETTINGS_BYTES)), "train")
    return {}


def _counted(counts: Mapping[str, int], noun: str) -> str:
    """Return the total and its parts, the largest first: `7 files (4 .pdf, 3 .docx)`."""
    ordered = sorted(((number, name) for name, number in counts.items() if number), key=lambda item: (-item[0], item[1]))
    if not ordered:
        return "none"
    total = sum(number for number, _ in ordered)
    shown = ", ".join(f"{number:,} {name.replace('_', ' ')}" for number, name in ordered[:_SHOWN])
    return f"{total:,} {noun}{'s' * (total != 1)} ({shown}{', …' if len(ordered) > _SHOWN else ''})"


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
    ]
    counts, duplicates = lookup(totals, "documents"), lookup(totals, "duplicates")
    if {"read", "train", "val", "rejected"} <= counts.keys():
        kept = f"{counts['train']:,} train + {counts['val']:,} val"
        head.append(f"documents    {counts['read']:,} read = {kept} + {counts['rejected']:,} rejected")
    if duplicates:
        words = ", ".join(f"{duplicates[name]:,} {name}" for name in ("exact", "near", "benchmark") if name in duplicates)
        head.append(f"duplicates   {words}")
    for source in duplicates.get("alarms") or ():
        head.append(f"alarm        {visible(source)} lost a larger share of its documents to duplicates than dedup.alarm_fraction")
    for source in duplicates.get("benchmark_alarms") or ():
        limit = "dedup.benchmark_alarm_fraction"
        head.append(f"alarm        {visible(source)} lost a larger share of its text to benchmarks than {limit}")
    read = max(counts.get("read", 0), 1)
    rejected = [
        {"stage": stage, "reason": reason, "documents": count, "share": count / read}
        for stage, lost in lookup(totals, "rejected").items()
        for reason, count in sorted(lost.items(), key=lambda item: (-item[1], item[0]))
    ]
    ignored = [{"ignored": reason, "extension": name, "files": count} for reason, name, count in by_extension(totals, "ignored")]
    sources = [
        {**one, **lookup(one, "documents"), "source": name, "text": lookup(one, "documents").get("text_bytes", 0)}
        for name, one in lookup(totals, "sources").items()
    ]

    def named(title: str, entries: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{title: name, **entry} for name, entry in entries.items()]

    tables = [
        _table(summary["shards"], "split source shards rows tokens targets bytes"),
        _table(named("label", lookup(totals, "labels", "documents")), "label train val"),
        _table(rejected, "stage reason documents share"),
        _table(ignored, "ignored extension files"),
        _table(sources, "source kind read kept text tokens bytes_per_token train_tokens share"),
        _table(
            named("language", largest_first(lookup(totals, "languages"), "bytes")),
            "language documents bytes tokens bytes_per_token",
        ),
        _table(named("length", lookup(totals, "lengths")), "length mean p50 p90 p95 p99 max"),
        textwrap.fill(summary["advice"], _COLUMNS),
        _table(
            named("split", lookup(totals, "rows")),
            "split rows loss_share fill_rate padding documents cut_documents cut_rate repeated_tokens",
        ),
        _table(named("packing", lookup(totals, "packing_methods")), "packing fill_rate cut_rate"),
    ]
    return "\n\n".join(("\n".join(head), *filter(None, tables)))


def _table(rows: list[dict[str, Any]], wanted: str) -> str:
    """Return the columns that have a value in any row, with their heads."""

    def cell(column: str, value: object) -> str:
        if isinstance(value, int | float):
            forms = {"share": share, "text": size}
            return forms[column](value) if column in forms else f"{value:,}"
        return " ".join(visible(str(value if value is not None else "")).split())

    shown = [column for column in wanted.split() if any(row.get(column) not in (None, "") for row in rows)]
    cells = [[column.replace("_", " "), *(cell(column, row.get(column)) for row in rows)] for column in shown]
    left = [number for number, column in enumerate(shown) if column in _WORDS]
    return columns([*zip(*cells, strict=True)], left)
