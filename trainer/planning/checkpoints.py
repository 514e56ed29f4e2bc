"""The space that the checkpoints of a run need on the disk."""

from __future__ import annotations

from trainer.checkpoint import missing_bytes, required_bytes, space_of
from trainer.config import CheckpointConfig, TrainConfig
from trainer.model.cost import FP32_BYTES
from trainer.model.decoder import num_weights
from trainer.model.memory_estimate import estimate
from trainer.runs.layout import CHECKPOINTS


def checkpoint_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Return the bytes of one checkpoint without frozen weights. An estimate, because an extension may build another model."""
    whole = estimate(config, vocab_size, config.model.context, 1, 1, config.optim.optimizer.state_bytes)
    return required_bytes([whole.weights - frozen_bytes(config, vocab_size), whole.optimizer, whole.average])


def frozen_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Return the bytes of the frozen weights, which all checkpoints share. There are none without adapters."""
    return 0 if config.lora.rank is None else FP32_BYTES * num_weights(config.model, vocab_size)


def most_checkpoints(settings: CheckpointConfig, num_steps: int) -> int:
    """Return the most checkpoints on the disk at one time, with the best one. Saves after `every_minutes` are not counted."""
    kept = settings.keep_last + 2
    if settings.keep_every is not None:
        kept += num_steps // settings.keep_every
    return min(kept, -(-num_steps // settings.every_steps)) if num_steps else kept


def space_needed(config: TrainConfig, vocab_size: int) -> tuple[int, int]:
    """Return the free bytes without which a run does not start, and those that all its checkpoints need."""
    space, each, shared = (
        space_of(config.run / CHECKPOINTS),
        checkpoint_bytes(config, vocab_size),
        frozen_bytes(config, vocab_size),
    )
    most = most_checkpoints(config.checkpoint, config.limits.steps or 0)
    return missing_bytes(space, each, shared), missing_bytes(space, each, shared, max(2, most))
