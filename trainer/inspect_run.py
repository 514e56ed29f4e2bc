"""Looking at a run that is finished or still going: evaluate or generate from one of its checkpoints."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from data_pipeline.errors import CheckpointError
from data_pipeline.manifest import read_manifest
from data_pipeline.shards import Rows
from data_pipeline.tokenizer import load_tokenizer
from trainer.attention import choose_backend
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.determinism import configure_determinism
from trainer.distributed import joined_group
from trainer.evaluate import evaluate
from trainer.extension import load_extension, seeded_model
from trainer.generate import Sampling, generate
from trainer.parallel import load_full
from trainer.step import LossModule

__all__ = ["evaluate_run", "generate_from_run", "load_checkpoint", "load_config"]


def load_config(run: Path) -> TrainConfig:
    """The settings that a run was last started with.

    Raises:
        CheckpointError: the directory holds no run.
    """
    try:
        return TrainConfig(**tomllib.loads((run / "config.toml").read_text())["train"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{run}: no config.toml, so this is no run; name a directory that `trainer train --run` wrote"
        ) from None


def load_checkpoint(run: Path, which: str) -> Checkpoint:
    """The checkpoint called `latest`, `best` or by its step, verified.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    store = CheckpointStore(run / "checkpoints")
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{run}: no checkpoint is there yet; train until the first is saved")
    if which not in ("latest", "best") and not which.isdecimal():
        raise CheckpointError(f"--checkpoint {which}: use latest, best, or one of the steps {', '.join(map(str, steps))}")
    if which.isdecimal():
        return store.load(int(which))
    latest = store.load(steps[-1])
    best = latest.state["progress"]["best_step"]
    return latest if which == "latest" or best is None else store.load(best)


def load_model(run: Path, config: TrainConfig, which: str) -> tuple[nn.Module, int]:
    """The model of a checkpoint with the averaged weights if there are any, and its step."""
    checkpoint = load_checkpoint(run, which)
    tokenizer = load_tokenizer(run / "tokenizer")
    source = run / "extension.py"
    model = seeded_model(load_extension(source if source.exists() else None), config.model, tokenizer.vocab_size, config.seed)
    load_full(model, checkpoint.average or checkpoint.model)
    return model.eval(), checkpoint.step


def evaluate_run(run: Path, which: str, *, as_json: bool) -> str:
    """Validation loss and perplexity of a checkpoint, as a line for people or a JSON object."""
    config = load_config(run)
    configure_determinism(config)
    with joined_group(config.device) as group:
        model, step = load_model(run, config, which)
        model.to(group.device)
        manifest = read_manifest(config.data)
        backend = choose_backend(
            config.attention,
            group.device,
            config.precision,
            config.model.head_size,
            compiled=False,
        )
        rows = Rows(config.data, manifest, "val", verify=config.verify_data)
        result = evaluate(LossModule(model, config.loss), backend, rows, config, group)
    if as_json:
        return json.dumps({"step": step, "val_loss": result.loss, "perplexity": result.perplexity, "targets": result.num_targets})
    return f"step {step}  validation loss {result.loss:.4f}  perplexity {result.perplexity:.2f}  ({result.num_targets} targets)"


def generate_from_run(run: Path, which: str, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yields the continuation of `prompt` piece by piece."""
    config = load_config(run)
    configure_determinism(config)
    with joined_group(config.device) as group:
        model, _ = load_model(run, config, which)
        yield from generate(model.to(group.device), load_tokenizer(run / "tokenizer"), prompt, sampling, config.model.context)
