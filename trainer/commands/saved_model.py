"""Loads the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from data_pipeline.tokenizer import load_tokenizer
from trainer.config import TrainConfig
from trainer.distributed.group import joined_group
from trainer.extensions.trust import run_extension
from trainer.extensions.user_model import seeded_model
from trainer.inference.text_model import TextModel
from trainer.machine.determinism import configure_determinism
from trainer.parallel.fsdp import load_full
from trainer.run.bounds import check_model_size
from trainer.run.directory import load_config, settings_here
from trainer.run.record import read_record
from trainer.run.state import load_checkpoint

__all__ = ["load_model", "opened_text_model"]


def load_model(run: Path, config: TrainConfig, which: str, *, trust_code: bool = False) -> tuple[nn.Module, int]:
    """Return the model of a checkpoint, with the averaged weights if there are any, and the step of the checkpoint.

    Raises:
        CheckpointError: the run or the checkpoint does not exist or is damaged.
        ConfigError: the run has code of its user, and neither `trust_code` nor an earlier training allows executing it.
    """
    extension = run_extension(run, read_record(run)["identity"].get("extension"), trust_code=trust_code)
    checkpoint = load_checkpoint(run, which)
    tokenizer = load_tokenizer(run / "tokenizer")
    weights = checkpoint.average or checkpoint.model
    if extension.build_model is None:  # before the model takes memory, because the settings may not match the checkpoint
        check_model_size(config.model, tokenizer.vocab_size, sum(tensor.numel() for tensor in checkpoint.model.values()))
    model = seeded_model(extension, config.model, tokenizer.vocab_size, config.seed)
    load_full(model, weights)
    return model.eval(), checkpoint.step


@contextmanager
def opened_text_model(run: Path, which: str, *, use_cache: bool = True, trust_code: bool = False) -> Iterator[TextModel]:
    """Yield the model of a checkpoint with its tokenizer, on the device of the run if this machine has such a device.

    Raises:
        CheckpointError: the run or the checkpoint does not exist or is damaged.
        ConfigError: code of the run needs consent; see `trainer.extensions.trust`.
    """
    config = settings_here(load_config(run))
    configure_determinism(config)
    with joined_group(config.device) as group:
        model, _ = load_model(run, config, which, trust_code=trust_code)
        yield TextModel(model.to(group.device), load_tokenizer(run / "tokenizer"), config.model.context, use_cache)
