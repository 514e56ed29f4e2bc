from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from common.errors import ConfigError
from data_pipeline.tokenizer import load_tokenizer
from trainer.checkpoint.of_run import averaged_weights, load_checkpoint
from trainer.config import TrainConfig
from trainer.distributed.group import Group, joined_group
from trainer.extensions.trust import run_extension
from trainer.finetuning.task import saved_task
from trainer.inference.text_model import TextModel
from trainer.machine.determinism import configure_determinism, settings_here
from trainer.model.lora import merged_weights
from trainer.model.memory_estimate import check_model_size
from trainer.parallel.fsdp import load_full
from trainer.runs.saved_run import SavedRun
from trainer.training.trainable import new_model


def load_model(saved: SavedRun, config: TrainConfig, which: str, *, trust_code: bool = False) -> tuple[nn.Module, int]:
    """Return the model of a checkpoint with merged adapters and averaged weights, if there are any, and the checkpoint's step."""
    run = saved.path
    extension = run_extension(run, saved.record.identity.get("extension"), trust_code=trust_code)
    checkpoint = load_checkpoint(saved, which)
    tokenizer = load_tokenizer(run / "tokenizer")
    weights = merged_weights(averaged_weights(checkpoint), config.lora)
    objective = saved_task(saved, config)
    if extension.build_model is None:  # before the model takes memory, because the settings may not match the checkpoint
        num_weights = sum(tensor.numel() for tensor in weights.values())
        check_model_size(config.model, tokenizer.vocab_size, num_weights, objective.num_weights)
    model = new_model(extension, objective, config.without_adapters, tokenizer.vocab_size)
    load_full(model, weights)
    return model.eval(), checkpoint.step


@contextmanager
def opened_model(
    saved: SavedRun, config: TrainConfig, which: str, *, trust_code: bool, alone: str = ""
) -> Iterator[tuple[nn.Module, Group, int]]:
    """Yield the model of a checkpoint on this rank's device, the group, and the step. `alone`: the command works on one rank."""
    configure_determinism(config)
    with joined_group(config.device) as group:
        if alone and group.world_size > 1:
            raise ConfigError(f"{alone} works on one rank and was started on {group.world_size}; start it without torchrun")
        model, step = load_model(saved, config, which, trust_code=trust_code)
        yield model.to(group.device), group, step


@contextmanager
def opened_text_model(run: Path, which: str, *, use_cache: bool = True, trust_code: bool = False) -> Iterator[TextModel]:
    """Yield the model of a checkpoint with its tokenizer, on the device of the run if this machine has such a device."""
    saved = SavedRun(run)
    check_writes(saved)
    config = settings_here(saved.config)
    with opened_model(saved, config, which, trust_code=trust_code) as (model, _, _):
        yield TextModel(model, load_tokenizer(run / "tokenizer"), config.model.context, use_cache)


def check_writes(saved: SavedRun) -> None:
    if not saved_task(saved, saved.config).writes:
        raise ConfigError(
            f"{saved.path}: it was trained with objective = {saved.config.objective}, and its model does not continue texts; use "
            "the command `evaluate` on it, or name a run with objective = language"
        )


def check_is_decoder(saved: SavedRun, reason: str, *, trust_code: bool) -> None:
    """Raise ConfigError if the model is not the built-in decoder. `reason` ends the sentence that says why another will not do."""
    run, config = saved.path, saved.config
    if run_extension(run, saved.record.identity.get("extension"), trust_code=trust_code).build_model is not None:
        raise ConfigError(f"{run}: its extension defines build_model, and {reason}; name a run whose extension has no build_model")
    objective = saved_task(saved, config)
    if objective.model is not None or not objective.writes:
        raise ConfigError(
            f"{run}: with objective = {config.objective} the model is not the built-in decoder, and {reason}; name a run with "
            "objective = language"
        )
