"""Small labelled data, prepared from texts that a classifier learns in a few steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare

WORDS = {
    "animal": ["cat", "dog", "horse", "sheep", "goose", "otter", "badger", "heron"],
    "colour": ["red", "green", "blue", "amber", "violet", "grey", "olive", "teal"],
    "metal": ["iron", "copper", "tin", "zinc", "lead", "silver", "cobalt", "nickel"],
}
"""The words of the texts with each label."""


def labelled_records(num_records: int, *, seed: int = 0, words: tuple[int, int] = (4, 12)) -> list[dict[str, Any]]:
    """Return records with `text` and `label`. A text has a random number of words of its label, in the range `words`."""
    generator = random.Random(seed)
    labels = sorted(WORDS)
    records = []
    for number in range(num_records):
        label = labels[number % len(labels)]
        records.append({"text": " ".join(generator.choices(WORDS[label], k=generator.randint(*words))), "label": label})
    return records


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records as JSON Lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare_labelled(folder: Path, records: list[dict[str, Any]], /, **changes: Any) -> Path:
    """Prepare records with byte tokens, in rows of 64 tokens, and return the folder of the data. `changes` are settings."""
    source = write_records(folder / "records.jsonl", records)
    settings: dict[str, Any] = {
        "sources": (str(source),),
        "output": folder / "data",
        "workers": 1,
        "row_length": 64,
        "records": {"label_field": "label"},
        "tokenizer": {"kind": "byte"},
        "dedup": {"near": False, "exact": False},
        "clean": {"min_chars": 1},
        "split": {"val_fraction": 0.2},
    }
    prepare(PrepareConfig(**settings | changes))
    return Path(settings["output"])
