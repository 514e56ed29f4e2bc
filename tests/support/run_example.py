"""Run directories with everything in them, written without a training, for tests of what shows runs to people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.files import sealed
from common.settings.dotted import to_toml
from tests.support.report_example import HOSTILE
from trainer.config import TrainConfig

__all__ = ["HOSTILE", "eval_event", "example_events", "train_event", "write_run"]

Event = dict[str, Any]


def train_event(step: int, loss: float, **others: Any) -> Event:
    """What a step leaves in `metrics.jsonl`."""
    plain = loss if math.isfinite(loss) else str(loss)
    event = {
        "event": "train",
        "step": step,
        "loss": plain,
        "loss_hex": loss.hex(),
        "grad_norm": 1.5 + math.sin(step),
        "lr": 0.001,
        "tokens": 1000 * step,
        "tokens_per_s": 2000.0,
        "mfu": 0.25,
        "seconds": 0.5,
        "loader_wait_s": 0.05,
    }
    return event | others


def eval_event(step: int, loss: float, **others: Any) -> Event:
    perplexity = math.exp(loss)
    return {
        "event": "eval", "step": step, "val_loss": loss, "val_loss_hex": loss.hex(), "perplexity": perplexity, "targets": 900,
    } | others  # fmt: skip


def example_events(num_steps: int = 60, words: str = "plain words") -> list[Event]:
    """Steps with one loss that is not a number, and everything that can stand between them; `words` are the strangers' text."""
    generator = np.random.default_rng(5)
    events = [eval_event(0, 6.0, **_groups(6.0, words))]
    for step in range(1, num_steps + 1):
        loss = math.nan if step == num_steps // 2 else 2 + 4 * math.exp(-step / 20) + float(generator.normal(0, 0.05))
        events.append(train_event(step, loss))
        if step % 10 == 0:
            convergence = {"train_loss": 2.0, "gap": 0.1 + step / 1000, "trend_per_1000_steps": -100 / step}
            events.append(eval_event(step, 2.1 + 4 * math.exp(-step / 20), **_groups(3.0, words), **convergence))
            events += [{"event": "sample", "step": step, "prompt": words, "text": f"{words} go on {place}"} for place in (1, 2)]
            events.append({"event": "scores", "step": step, "distinct_2": 0.81, "self_bleu": 0.2, "note": words})
            events.append({"event": "layers", "step": step} | {name: _layers(step) for name in ("gradient_norm", "update_ratio")})
            events.append(_hardware(step))
            events.append({"event": "save", "step": step, "stall_s": 0.25})
    events.append(
        {
            "event": "alert", "step": num_steps, "rule": "non_finite", "severity": "critical", "message": f"loss is nan; {words}",
            "action": "skip", "value": "nan", "threshold": None,
        }
    )  # fmt: skip
    events.append({"event": "alert", "step": num_steps, "message": "an alert of an older version"})
    return events


def write_run(directory: Path, events: Iterable[Mapping[str, Any]] | None, /, **changes: Any) -> Path:
    """A run directory with a sealed record; `changes` are of the record's parts and of `settings`. Returns `directory`."""
    directory.mkdir(parents=True)
    settings = {"data": "/data", "run": str(directory), "limits": {"steps": 60}} | changes.pop("settings", {})
    config = TrainConfig(**settings).model_dump(mode="json")
    (directory / "config.toml").write_bytes(to_toml("train", config).encode())
    record = {
        "format": 1,
        "status": "finished",
        "step": 60,
        "weights": "sha256:" + "77" * 32,
        "identity": {"device": "cpu, AVX512", "extension": None, "threads": 2, "torch": "2.13.0", "data": "sha256:" + "aa" * 32},
        "data": {"root_digest": "sha256:" + "aa" * 32, "tokenizer_digest": "sha256:" + "bb" * 32},
        "environment": {
            "python": "3.11.2", "torch": "2.13.0", "cuda": None, "packages": {"numpy": "2.0"}, "locks": {"r.lock": "sha256:1"},
            "processor": "a processor", "platform": "Linux", "gpus": [], "image": None, "code": "abc", "world_size": 1,
        },
        "files": {"config.toml": "sha256:" + "cc" * 32},
    }  # fmt: skip
    (directory / "record.json").write_bytes(sealed(record | changes))
    if events is not None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return directory


def _groups(loss: float, words: str) -> Event:
    names = {"by_source": ("web", words), "by_kind": ("prose", "code"), "by_length": ("1 to 15", "16 to 31")}
    found: Event = {
        key: {name: {"loss": loss + place, "targets": 450} for place, name in enumerate(each)} for key, each in names.items()
    }
    return found | {"bits_per_byte": loss / 3}


def _layers(step: int) -> dict[str, float]:
    return {f"layers.{number}": 0.001 * (number + 1) * (1 + step % 3) for number in range(3)}


def _hardware(step: int) -> Event:
    gpus = [
        {
            "index": number,
            "name": "NVIDIA H100",
            "utilisation": 0.9 - step / 1000,
            "temperature_c": 60 + step % 7,
            "memory_total_mib": 81559.0,
        }
        for number in range(2)
    ]
    return {"event": "hardware", "step": step, "gpus": gpus, "host": {"rss_mib": 900.0 + step, "cpu": 0.4}}
