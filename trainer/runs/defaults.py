"""Settings that nobody has given: from the data, the machine or another run. `chosen` is the rule of `--recipe auto`.

It needs neither torch nor a measurement, so every rank of a run makes the same choice. Time is only estimated here: the run itself
keeps to `limits.minutes`, and lowers the learning rate in time. `docs/guide/model-size.md` shows what the rule chooses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from common.errors import CheckpointError
from common.hardware import num_cores
from common.settings.load import AUTO
from common.settings.model import all_settings
from trainer.config import LimitsConfig, ModelConfig, TrainConfig
from trainer.config.model import shape_settings
from trainer.config.optimization import OPTIMIZERS
from trainer.runs.layout import CONFIG, not_a_run
from trainer.runs.saved_run import SavedRun

SHAPES = (
    *((2, 64, 2), (4, 128, 4), (4, 192, 6), (6, 256, 8), (6, 384, 6), (8, 512, 8)),
    *((12, 768, 12), (16, 1024, 16), (24, 1536, 24), (24, 2048, 32)),
)
"""Layers, width and heads of the models to choose from, from small to large."""
MINUTES = 10.0  # the time of a training without any limit
MOST_EPOCHS = 8.0  # passes over the text at most: with more, a model of this size learns the text by heart
_FLOPS_PER_CORE, _FLOPS_PER_GPU = 30e9, 60e12  # floating-point operations per second that a small model reaches
_TRAINING_SHARE = 0.8  # part of the time that is left after loading, evaluations and saves
_SMALL_BATCH_TOKENS, _SMALL_WEIGHTS = 2048, 1.4e6
"""Tokens in a step of a model with this many weights. They grow with the square root of the weights."""
_LEAST_ROWS, _MOST_MICRO = 8, 8
_LR_WIDTH = 128  # the width of the model for which the optimizers state their learning rates
_EVALUATION_SHARE = 0.05
_OF_POSITIONS = ("rope_theta", "rope_scaling")  # settings of the model that may be changed for other weights


def recorded_in(given: Mapping[str, Any]) -> Path | None:
    """A command continues a run if it names no data and no recipe, or the recipe `auto`, or the data and no other setting."""
    is_free = given.keys().isdisjoint(("data", "recipe")) or given.keys() <= {"run", "data", "resume"}
    if "run" not in given or (given.get("recipe") != AUTO and not is_free):
        return None
    path = Path(given["run"]) / CONFIG
    return path if path.is_file() else None


def inherited(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a run takes from the run `init`: its shape, at least its context, and its rotary positions."""
    if given.get("init") is None:
        return {}
    folders = [Path(given["init"]), *([Path(given["run"])] if given.get("run") is not None else [])]
    found = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if found is None:
        raise CheckpointError(f"init = {not_a_run(folders[0], CONFIG)}")
    try:
        model = ModelConfig.model_validate(SavedRun(found).settings["model"])
    except (ValidationError, KeyError) as error:
        raise CheckpointError(
            f"{found / CONFIG}: the settings of the model cannot be read ({str(error).splitlines()[0]}); restore the file from a "
            "copy"
        ) from None
    settings = {f"model.{name}": getattr(model, name) for name in shape_settings()}
    settings["model.context"] = max(model.context, _usable({"model.context": given.get("model.context")}).get("model.context", 0))
    return settings | {f"model.{name}": getattr(model, name) for name in _OF_POSITIONS if f"model.{name}" not in given}


@dataclass(frozen=True)
class Facts:
    num_tokens: int  # tokens of the training rows, without padding
    row_length: int
    vocab_size: int
    num_gpus: int  # on all nodes; 0 on CPUs
    num_cores: int  # on all nodes
    num_ranks: int

    @property
    def flops_per_s(self) -> float:
        return self.num_gpus * _FLOPS_PER_GPU or self.num_cores * _FLOPS_PER_CORE


def chosen(given: Mapping[str, Any], variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings for the data that `given` names, on this machine; none if it names no data."""
    if "data" not in given:
        return {}
    from data_pipeline.dataset.manifest import read_manifest  # loads NumPy and SentencePiece, which other settings do not need

    manifest = read_manifest(Path(given["data"]))
    tokens = sum(shard.tokens for shard in manifest.shards if shard.split == "train")
    ranks, nodes = _num_ranks(variables)
    gpus = 0 if given.get("device") == "cpu" else visible_gpus(variables)
    cores = num_cores()
    return choose(Facts(tokens, manifest.row_length, manifest.vocab_size, nodes * gpus, nodes * cores, ranks), given)


def choose(facts: Facts, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by their names, without those that are given. The others are chosen to go with `given`."""
    names, given = set(given), _usable(given)
    known = {name for name in LimitsConfig.model_fields if f"limits.{name}" in given}
    chosen: dict[str, Any] = {} if known - {"minutes"} else {"limits.epochs": MOST_EPOCHS}
    if not known:
        chosen["limits.minutes"] = MINUTES
    limits = chosen | given
    chosen |= _model(facts, limits)
    weights = _weights(facts, chosen | limits)
    rows, micro = _batch(facts, given, weights)
    num_steps = max(1, round(_num_tokens(facts, limits, weights, rows) / (rows * facts.row_length)))
    every = max(1, num_steps // 10)
    chosen |= {
        "model.context": facts.row_length,
        "batch.global_batch_size": rows,
        "batch.micro_batch_size": micro,
        **_rates(given, (chosen | limits)["model.width"]),
        **({} if "schedule.kind" in names else {"schedule.kind": "wsd", "schedule.decay_share": 0.5, "schedule.min_lr_ratio": 0.0}),
        "schedule.warmup_steps": min(200, num_steps // 20),
        "eval.every_steps": every,
        "eval.max_rows": max(8 * rows, round(3 * _EVALUATION_SHARE * every * rows)),
        "checkpoint.every_steps": every,
    }
    return {name: value for name, value in chosen.items() if name not in names}


def tokens_per_weight(num_weights: int) -> int:
    """Return the least tokens for each weight: those of Hoffmann et al. (2022) for large models, fewer for small ones."""
    return 1 if num_weights < 3e6 else 4 if num_weights < 3e7 else 20


def _usable(given: Mapping[str, Any]) -> dict[str, Any]:
    usable: dict[str, Any] = {}
    for name, field in all_settings(TrainConfig):
        if name in given:
            kind: Any = Annotated[field.annotation, field]
            with suppress(ValidationError):
                usable[name] = TypeAdapter(kind).validate_python(given[name])
    return {name: value for name, value in usable.items() if value is not None}


def _model(facts: Facts, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the largest shape for which time and text suffice. A width or heads that are given decide about the other."""
    best = SHAPES[0]
    for shape in SHAPES:
        weights = _weights(facts, _named(shape) | limits)
        if _num_tokens(facts, limits, weights, None) >= tokens_per_weight(weights) * weights:
            best = shape
    named = _named(best)
    if "model.width" in limits and "model.heads" not in limits:
        width = limits["model.width"]
        named["model.heads"] = next(heads for heads in range(max(1, width // 64), width + 1) if width % heads == 0)
    elif "model.heads" in limits and "model.width" not in limits:
        named["model.width"] = -(-named["model.width"] // (2 * limits["model.heads"])) * 2 * limits["model.heads"]
    return named


def _named(shape: tuple[int, int, int]) -> dict[str, Any]:
    return dict(zip(("model.layers", "model.width", "model.heads"), shape, strict=True))


def _weights(facts: Facts, settings: dict[str, Any]) -> int:
    layers, width = settings["model.layers"], settings["model.width"]
    mlp = ModelConfig(width=width, heads=1, head_dim=2).mlp_size
    return int(layers * (4 * width * width + 3 * width * mlp) + facts.vocab_size * width)


def _num_tokens(facts: Facts, limits: dict[str, Any], weights: int, rows: int | None) -> float:
    bounds = []
    if minutes := limits.get("limits.minutes"):
        bounds.append(facts.flops_per_s * 60 * minutes * _TRAINING_SHARE / (6 * weights))
    if epochs := limits.get("limits.epochs"):
        bounds.append(epochs * facts.num_tokens)
    if tokens := limits.get("limits.tokens"):
        bounds.append(tokens)
    if steps := limits.get("limits.steps"):
        bounds.append(steps * (rows or _rows_of(facts, limits, weights)) * facts.row_length)
    return float(min(bounds))


def _rows_of(facts: Facts, given: dict[str, Any], weights: int) -> int:
    if "batch.global_batch_size" in given:
        return int(given["batch.global_batch_size"])
    tokens = _SMALL_BATCH_TOKENS * math.sqrt(max(1.0, weights / _SMALL_WEIGHTS))
    return max(_LEAST_ROWS, 1 << round(math.log2(max(1.0, tokens / facts.row_length))))


def _batch(facts: Facts, given: dict[str, Any], weights: int) -> tuple[int, int | str]:
    """Return the rows of a step, and of a micro-batch. Both divide evenly over the ranks."""
    rows, ranks = _rows_of(facts, given, weights), facts.num_ranks
    if "batch.micro_batch_size" in given:
        each = ranks * (1 if given["batch.micro_batch_size"] == "auto" else given["batch.micro_batch_size"])
        return -(-rows // each) * each, given["batch.micro_batch_size"]
    if "batch.global_batch_size" not in given:
        rows = -(-rows // ranks) * ranks
    if facts.num_gpus:
        return rows, "auto"
    of_rank = max(1, rows // ranks)
    return rows, max(micro for micro in range(1, min(of_rank, _MOST_MICRO) + 1) if of_rank % micro == rows % micro == 0)


def _rates(given: dict[str, Any], width: int) -> dict[str, Any]:
    """Return optimizer and learning rates: Muon, except for adapters."""
    kind = given.get("optim.kind", "muon")
    if kind not in OPTIMIZERS or "lora.rank" in given:
        kind = "adamw"
    rates = OPTIMIZERS[kind].rates
    return {"optim.kind": kind, **rates, "optim.lr": float(f"{rates['optim.lr'] * min(1.0, _LR_WIDTH / width):.2g}")}


def _num_ranks(variables: Mapping[str, str]) -> tuple[int, int]:
    def number(name: str) -> int | None:
        value = variables.get(name, "")
        return int(value) if value.isdecimal() and 0 < int(value) < 1 << 20 else None

    if (world := number("WORLD_SIZE")) is not None:
        return world, max(1, world // (number("LOCAL_WORLD_SIZE") or world))
    nodes = number("PET_NNODES") or 1
    here = number("PET_NPROC_PER_NODE") or visible_gpus(variables) or number("CPU_RANKS") or 1
    return here * nodes, nodes


def visible_gpus(variables: Mapping[str, str]) -> int:
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return there if visible is None or not there else len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
