"""A model wrapped for training, in micro-batches that memory holds."""

from __future__ import annotations

from torch import nn

from common.errors import ConfigError
from data_pipeline.dataset.manifest import Manifest
from trainer.config import TrainConfig
from trainer.data.adjustments import Change, Changes, smaller_micro
from trainer.distributed.group import Group
from trainer.machine.memory import release_memory
from trainer.model.attention import Backend
from trainer.model.forward import LossModule
from trainer.parallel.accumulation import Accumulation
from trainer.parallel.wrapping import MicroTooLarge, wrap_for_training

__all__ = ["smaller_batches", "wrapped"]


def wrapped(
    loss: LossModule, config: TrainConfig, changes: Changes, group: Group, step: int, manifest: Manifest, backend: Backend
) -> tuple[nn.Module, Accumulation, Changes]:
    """`wrap_for_training` for the micro-batches of a step, or for smaller ones where these do not fit; with what was changed.

    Raises:
        ConfigError: see `smaller_batches`.
    """
    while True:
        batch = changes.batch(config.batch, step)
        try:
            as_changed = config.model_copy(update={"batch": batch})
            module, accumulation = wrap_for_training(loss, as_changed, group, manifest.row_length, backend)
            return module, accumulation, changes
        except MicroTooLarge:
            change = smaller_batches(config, changes, step)
        changes = changes.plus(change)
        release_memory()


def smaller_batches(config: TrainConfig, changes: Changes, step: int) -> Change:
    """What follows from a lack of memory in a step: smaller micro-batches, and more of them, which give the same gradient.

    Raises:
        ConfigError: there are no smaller ones, or they would be another sum under `reproducibility = elastic`.
    """
    now = changes.batch(config.batch, step).micro_rows
    remedies = "model.activation_checkpointing = full, precision = bf16, parallel = fsdp with more ranks, or a smaller model"
    if config.reproducibility == "elastic":
        raise ConfigError(
            f"step {step}: out of memory with batch.micro = {now}, which reproducibility = elastic fixes, as the bits depend on "
            f"it; begin a run with a smaller batch.micro, or use {remedies}"
        )
    smaller = smaller_micro(now)
    if smaller is None:
        raise ConfigError(f"step {step}: out of memory with a single row in a micro-batch; use {remedies}, or shorter rows")
    return Change(step, f"{now} rows ran out of memory", micro=smaller)
