"""A model from one of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from common.errors import CheckpointError
from data_pipeline.tokenizer import load_tokenizer
from trainer.checkpoint import Checkpoint, CheckpointStore
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
from trainer.run.state import load_whole

__all__ = ["load_checkpoint", "load_model", "opened_text_model"]


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
        return load_whole(store, int(which))[0]
    latest, state = load_whole(store, steps[-1])
    best = state.progress.best_step
    return latest if which == "latest" or best is None else load_whole(store, best)[0]


def load_model(run: Path, config: TrainConfig, which: str, *, trust_code: bool = False) -> tuple[nn.Module, int]:
    """The model of a checkpoint with the averaged weights if there are any, and its step.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        ConfigError: the model is code that came with the run, and `trust_code` does not allow to execute it.
    """
    extension = run_extension(run, read_record(run)["identity"].get("extension"), trust_code=trust_code)
    checkpoint = load_checkpoint(run, which)
    tokenizer = load_tokenizer(run / "tokenizer")
    weights = checkpoint.average or checkpoint.model
    if extension.build_model is None:  # before memory is taken for what the settings say, which the checkpoint may not fit
        check_model_size(config.model, tokenizer.vocab_size, sum(tensor.numel() for tensor in checkpoint.model.values()))
    model = seeded_model(extension, config.model, tokenizer.vocab_size, config.seed)
    load_full(model, weights)
    return model.eval(), checkpoint.step


@contextmanager
def opened_text_model(run: Path, which: str, *, use_cache: bool = True, trust_code: bool = False) -> Iterator[TextModel]:
    """The model of a checkpoint with its tokenizer, on the device of the run if it is here, to write text with.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        ConfigError: code of the run needs consent; see `trainer.extensions.trust`.
    """
    config = settings_here(load_config(run))
    configure_determinism(config)
    with joined_group(config.device) as group:
        model, _ = load_model(run, config, which, trust_code=trust_code)
        yield TextModel(model.to(group.device), load_tokenizer(run / "tokenizer"), config.model.context, use_cache)
