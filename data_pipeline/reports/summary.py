from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.command_line import command_text
from common.files import UnusableFileError, read_input
from common.settings.load import AUTO, MAX_SETTINGS_BYTES, recipe_path
from common.settings.toml import parse_toml
from common.text import visible
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.layout import TOKENIZER
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports.lookup import by_extension, lookup
from data_pipeline.sources.formats import IgnoredReason

_SHOWN = 6  # the most reasons or extensions in a line
_FIRST_STEPS = 1000  # steps of the suggested training, if the recipe does not limit it
_LENGTHS = ("steps", "epochs", "tokens")


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
        lines["ignored"] = _counted(_ignored(totals), "file")
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


def _ignored(totals: Mapping[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for reason, extension, number in by_extension(totals, "ignored"):
        is_format = reason in (IgnoredReason.UNKNOWN_FORMAT, IgnoredReason.UNKNOWN_MEMBER)
        counts[extension if is_format else f"{extension} {reason}"] += number
    return counts


def _counted(counts: Mapping[str, int], noun: str) -> str:
    """Return the total and its parts, the largest first: `7 files (4 .pdf, 3 .docx)`."""
    ordered = sorted(((number, name) for name, number in counts.items() if number), key=lambda item: (-item[0], item[1]))
    if not ordered:
        return "none"
    total = sum(number for number, _ in ordered)
    shown = ", ".join(f"{number:,} {name.replace('_', ' ')}" for number, name in ordered[:_SHOWN])
    return f"{total:,} {noun}{'s' * (total != 1)} ({shown}{', …' if len(ordered) > _SHOWN else ''})"
