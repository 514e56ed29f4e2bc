"""The largest micro-batch that fits into memory, the same on every rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from common.errors import ConfigError
from common.text import format_bytes
from trainer.config import BatchConfig
from trainer.context import RunContext
from trainer.extensions.hooks import Extension
from trainer.finetuning.task import LANGUAGE, Task
from trainer.machine.memory import USABLE_SHARE, available_bytes, fits_in_memory, isolated_rng, release_memory
from trainer.model.forward import empty_micro_batch
from trainer.model.memory_estimate import MemoryEstimate, estimate
from trainer.training.step import MicroStep, custom_step_loss
from trainer.training.trainable import hold_copy, new_loss, new_model

_log = logging.getLogger(__name__)

_UNEVEN = 1.125  # rows of the busiest rank relative to an even share, at most. A larger micro-batch is worth this much imbalance.


def micro_candidates(global_batch_size: int, world_size: int) -> list[int]:
    """Return divisors of the global batch, largest first, that give a rank at most an eighth over an even share, or the fewest."""
    if global_batch_size < world_size:
        raise ConfigError(
            f"batch.global_batch_size = {global_batch_size} leaves some of {world_size} ranks without rows; "
            f"use at least {world_size}"
        )
    small = [divisor for divisor in range(1, math.isqrt(global_batch_size) + 1) if global_batch_size % divisor == 0]
    divisors = {*small, *(global_batch_size // divisor for divisor in small)}
    busiest = {micro: -(-(global_batch_size // micro) // world_size) * micro for micro in divisors}
    limit = max(min(busiest.values()), _UNEVEN * global_batch_size / world_size)
    return [
        micro for micro, rows in sorted(busiest.items(), reverse=True) if rows <= limit and global_batch_size // micro >= world_size
    ]


def batch_for(batch: BatchConfig, recorded: int | None, num_ranks: int, *, elastic: bool) -> BatchConfig:
    """Return the sizes with a smaller `micro_batch_size` if nobody has set it and it leaves ranks without rows.

    If it is `auto`, the number of an earlier start is used again, because the bits depend on it.
    """
    if batch.micro_batch_size == "auto" and recorded is not None:
        return BatchConfig(global_batch_size=batch.global_batch_size, micro_batch_size=recorded)
    is_free = batch.micro_batch_size != "auto" and "micro_batch_size" not in batch.model_fields_set and not elastic
    return spread(batch, num_ranks) if is_free and batch.micro_batches < num_ranks else batch


def spread(batch: BatchConfig, num_ranks: int) -> BatchConfig:
    micro = next(rows for rows in micro_candidates(batch.global_batch_size, num_ranks) if rows <= batch.micro_rows)
    return BatchConfig(global_batch_size=batch.global_batch_size, micro_batch_size=micro)


def choose_micro(
    global_batch_size: int, estimated: Callable[[int], MemoryEstimate], free_bytes: int, row_length: int, world_size: int
) -> int:
    """Return the largest candidate whose estimate fits into nine tenths of the free memory. Raises ConfigError if none does."""
    candidates = micro_candidates(global_batch_size, world_size)
    fitting = next((micro for micro in candidates if estimated(micro).total <= USABLE_SHARE * free_bytes), None)
    if fitting is None:
        raise ConfigError(
            f"batch.micro_batch_size = auto found no size that fits: {format_bytes(free_bytes)} are free on this rank, the run may "
            f"use {USABLE_SHARE:.0%} of that, and micro-batches of {candidates[-1]} rows of {row_length} tokens need more "
            f"({estimated(candidates[-1]).describe()}). Use model.activation_checkpointing = full, precision = bf16, parallel = "
            "fsdp with more ranks, shorter rows or a smaller model; or set batch.micro_batch_size to a number to try it anyway"
        )
    return fitting


def probe(run: Callable[[int], None], candidates: Sequence[int]) -> int:
    """Return the first candidate with enough memory. `run` exchanges nothing: a rank without memory would let the others wait."""
    with isolated_rng():
        for micro in candidates:
            if fits_in_memory(partial(run, micro)):
                return micro
            release_memory()
    raise ConfigError(
        f"out of memory even with micro-batches of {candidates[-1]} rows; use model.activation_checkpointing = full, "
        "precision = bf16, parallel = fsdp with more ranks, shorter rows or a smaller model"
    )


def expected_memory(context: RunContext, micro: int, task: Task) -> MemoryEstimate:
    config, manifest, group = context.config, context.manifest, context.group
    state, device = config.optim.optimizer.state_bytes, group.device.type
    found = estimate(config, manifest.vocab_size, manifest.row_length, group.world_size, micro, state, context.backend, device)
    return found if task.memory is None else task.memory(found, context)


def with_micro(context: RunContext, extension: Extension, task: Task = LANGUAGE) -> RunContext:
    """Choose the size of the micro-batch if it is `auto`. The rank with the least memory decides."""
    config, group = context.config, context.group
    if config.batch.micro_batch_size != "auto":
        return context
    estimated = partial(expected_memory, context, task=task)
    free = group.smallest(available_bytes(group.device, group.local_world_size))
    micro = choose_micro(config.batch.global_batch_size, estimated, free, context.manifest.row_length, group.world_size)
    if config.parallel == "ddp":  # a pass of FSDP exchanges weights: if one rank ran out of memory, the others would wait for it
        candidates = [rows for rows in micro_candidates(config.batch.global_batch_size, group.world_size) if rows <= micro]
        fitting = probe(_trial(context, extension, task), candidates)
        release_memory()  # the cache of the trial, because NCCL takes its memory outside of PyTorch's cache
        micro = group.smallest(fitting)
    _log.info("batch.micro_batch_size = auto: %d rows; %s", micro, estimated(micro).describe())
    return context.with_batch(BatchConfig(global_batch_size=config.batch.global_batch_size, micro_batch_size=micro))


def _trial(context: RunContext, extension: Extension, task: Task) -> Callable[[int], None]:
    """Return a function that makes the passes of a micro-batch of padding, in the memory that a training would leave for them."""
    config, device, backend = context.config, context.group.device, context.backend
    loss = new_loss(new_model(extension, task, config, context.manifest.vocab_size).to(device), extension, task, config.loss)
    hold_copy(context, task)
    needs = expected_memory(context, 1, task)
    taken = torch.empty(needs.gradients + needs.optimizer + needs.average + needs.tree, dtype=torch.uint8, device=device)

    def run(rows: int, _held: torch.Tensor = taken) -> None:
        by_sequence = config.loss.reduction == "sequences"
        empty = empty_micro_batch(rows, context.manifest.row_length, backend, with_weights=by_sequence)
        try:
            micro = MicroStep(loss, loss, empty, context, (0, 0), lambda loss_sum: loss_sum)
            if context.custom_step:
                custom_step_loss(micro, extension, task)
            else:
                micro.backward(micro.loss_sum())
        finally:
            loss.zero_grad(set_to_none=True)

    return run
