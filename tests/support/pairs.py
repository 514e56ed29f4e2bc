"""Preference pairs and a model to fine-tune on them, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.loop import train

_COLOURS, _ANIMALS = ("red", "blue", "green", "black"), ("cat", "dog", "bird", "fish")


def pair_records(count: int) -> list[dict[str, str]]:
    """Return pairs whose better answer names the animal first, and whose worse answer names the colour first."""
    pairs = []
    for number in range(count):
        colour, animal = _COLOURS[number % 4], _ANIMALS[number // 4 % 4]
        prompt = f"Say {colour} and {animal}, {number}."
        pairs.append({"prompt": prompt, "chosen": f"{animal} {colour}!", "rejected": f"{colour} {animal}!"})
    return pairs


def write_pairs(folder: Path, count: int = 60, **changes: Any) -> Path:
    """Prepare `pair_records` in rows of 256 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pair_records(count)))
    settings: dict[str, Any] = {
        "sources": (str(folder / "pairs.jsonl"),),
        "output": folder / "pairs",
        "workers": 1,
        "row_length": 256,
        "records": {"prompt_field": "prompt", "chosen_field": "chosen", "rejected_field": "rejected"},
        "chat": {"template": "chatml"},
        "tokenizer": {"kind": "byte"},
        "dedup": {"near": False},
        "split": {"val_fraction": 0.25},
    }
    prepare(PrepareConfig(**settings | changes))
    return folder / "pairs"


def write_trunk(folder: Path, steps: int = 4, **settings: Any) -> Path:
    """Train a small model on the better and worse answers as conversations, so that it prefers neither.

    `settings` are further settings of its training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"prompt": one["prompt"], "text": one[name]} for one in pair_records(60) for name in ("chosen", "rejected")]
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    prepared: dict[str, Any] = {
        "sources": (str(folder / "chats.jsonl"),),
        "output": folder / "chats",
        "workers": 1,
        "row_length": 256,
        "records": {"prompt_field": "prompt"},
        "chat": {"template": "chatml"},
        "tokenizer": {"kind": "byte"},
        "dedup": {"near": False},
    }
    prepare(PrepareConfig(**prepared))
    run = folder / "trunk"
    changes: dict[str, Any] = {
        "limits": {"steps": steps},
        "schedule": {"decay_steps": steps, "warmup_steps": 1},
        "eval": {"sample_tokens": 0},
    }
    model = {"context": 256} | settings.pop("model", {})
    train(tiny_config(folder / "chats", run, model=model, **changes | settings))
    return run


def pair_config(pairs: Path, trunk: Path, run: Path, **changes: Any) -> TrainConfig:
    """Return settings of a fine-tuning on pairs: 8 steps of 8 rows, saved every 2 steps, evaluated every 4."""
    settings: dict[str, Any] = {
        "model": {"context": 256},
        "objective": "preference",
        "init": trunk,
        "limits": {"steps": 8},
        "schedule": {"decay_steps": 8, "warmup_steps": 1},
        "eval": {"every_steps": 4, "sample_tokens": 0},
        "checkpoint": {"every_steps": 2},
    }
    for name, value in changes.items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    return tiny_config(pairs, run, **settings)
