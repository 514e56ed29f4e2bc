"""The largest micro-batch that fits, the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from common.errors import ConfigError
from common.text import format_bytes
from trainer.config import BatchConfig, TrainConfig
from trainer.extensions.hooks import Extension
from trainer.extensions.user_model import seeded_model
from trainer.machine.memory import USABLE_SHARE, available_bytes, is_out_of_memory, isolated_rng, release_memory
from trainer.model.forward import LossModule, empty_micro_batch, forward_pass
from trainer.model.memory_estimate import MemoryEstimate, estimate
from trainer.optim.optimizers import state_bytes_per_weight
from trainer.run.context import RunContext

__all__ = ["choose_micro", "micro_candidates", "probe", "with_micro"]

_UNEVEN = 1.125
"""How much more than an even share the busiest rank may have for the sake of a larger micro-batch."""


def micro_candidates(global_rows: int, world_size: int) -> list[int]:
    """Sizes of a micro-batch worth trying, largest first: divisors of `global_rows` that spread well over the ranks.

    A step takes as long as its busiest rank. Sizes that give it at most an eighth more rows than an even share are taken;
    where there is none, those that give it the fewest.

    Raises:
        ConfigError: there are fewer rows than ranks.
    """
    if global_rows < world_size:
        raise ConfigError(
            f"batch.global_rows = {global_rows} leaves some of {world_size} ranks without rows; use at least {world_size}"
        )
    busiest = {micro: -(-(global_rows // micro) // world_size) * micro for micro in _divisors(global_rows)}
    limit = max(min(busiest.values()), _UNEVEN * global_rows / world_size)
    return [micro for micro, rows in sorted(busiest.items(), reverse=True) if rows <= limit and global_rows // micro >= world_size]


def choose_micro(
    config: TrainConfig, estimated: Callable[[int], MemoryEstimate], free_bytes: int, row_length: int, world_size: int
) -> int:
    """The largest candidate whose estimate fits into nine tenths of the free memory.

    Args:
        config: all settings; its `batch.micro` is not read.
        estimated: the estimate for a number of rows.
        free_bytes: what this rank may use, before anything of the run is on the device: see `available_bytes`.
        row_length: tokens of a row, for the message.
        world_size: ranks of the run.

    Raises:
        ConfigError: not even the smallest micro-batch fits, or there are fewer rows than ranks.
    """
    candidates = micro_candidates(config.batch.global_rows, world_size)
    fitting = next((micro for micro in candidates if estimated(micro).total <= USABLE_SHARE * free_bytes), None)
    if fitting is None:
        raise ConfigError(
            f"batch.micro = auto found no size that fits: {format_bytes(free_bytes)} are free on this rank, of which "
            f"{USABLE_SHARE:.0%} are planned with, and micro-batches of {candidates[-1]} rows of {row_length} tokens need more "
            f"({estimated(candidates[-1]).describe()}). Use model.activation_checkpointing = full, precision = bf16, parallel = "
            "fsdp with more ranks, shorter rows or a smaller model; or set batch.micro to a number to try it all the same"
        )
    return fitting


def probe(run: Callable[[int], None], candidates: Sequence[int]) -> int:
    """The first of the candidates, largest first, whose pass does not run out of memory.

    The generators of random numbers are as before afterwards, and so is everything else if `run` keeps to its part.

    Args:
        run: makes one forward and backward pass over that many rows of throwaway data on this rank, without an exchange
            between ranks (one of them might be out of memory while the others wait), and clears the gradients.
        candidates: rows of a micro-batch, largest first.

    Raises:
        ConfigError: even the last one runs out of memory.
    """
    with isolated_rng():
        for micro in candidates:
            if _fits(run, micro):
                return micro
            release_memory()
    raise ConfigError(
        f"out of memory even with micro-batches of {candidates[-1]} rows; use model.activation_checkpointing = full, "
        "precision = bf16, parallel = fsdp with more ranks, shorter rows or a smaller model"
    )


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _fits(run: Callable[[int], None], micro: int) -> bool:
    """The error is let go of on return, and with it the tensors that its traceback holds."""
    try:
        run(micro)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


_log = logging.getLogger(__name__)


def with_micro(context: RunContext, extension: Extension, recorded: int | None) -> RunContext:
    """The settings with `batch.micro` as a number.

    Args:
        context: the settings, which are returned as they are if they name a number, and the ranks, of which the one with the least
            memory decides.
        extension: what may replace the model and the loss.
        recorded: the number that the run was begun with; it is taken, because the bits depend on it.

    Raises:
        ConfigError: no size fits.
    """
    config, manifest, group, backend = context.config, context.manifest, context.group, context.backend
    if config.batch.micro != "auto":
        return context
    if recorded is not None:
        return _with(context, recorded)
    estimated = partial(
        estimate,
        config,
        manifest.vocab_size,
        manifest.row_length,
        group.world_size,
        optimizer_bytes=state_bytes_per_weight(config.optim),
        backend=backend,
        device_type=group.device.type,
    )
    free = group.smallest(available_bytes(group.device, group.local_world_size))
    micro = choose_micro(config, lambda rows: estimated(micro=rows), free, manifest.row_length, group.world_size)
    if config.parallel == "ddp":  # a pass of FSDP is an exchange, in which one rank without memory would leave the others waiting
        candidates = [rows for rows in micro_candidates(config.batch.global_rows, group.world_size) if rows <= micro]
        tried = _Trial(context, extension)
        micro = group.smallest(probe(tried, candidates))
        del tried
    _log.info("batch.micro = auto: %d rows; %s", micro, estimated(micro=micro).describe())
    return _with(context, micro)


class _Trial:
    """Passes of a model that is thrown away, with as much memory taken beside it as the optimizer will need."""

    def __init__(self, context: RunContext, extension: Extension) -> None:
        config, manifest, group, backend = context.config, context.manifest, context.group, context.backend
        model = seeded_model(extension, config.model, manifest.vocab_size, config.seed).to(group.device)
        self._loss = LossModule(model, config.loss, extension.own_loss)
        self._context = context
        state = state_bytes_per_weight(config.optim)
        needs = estimate(config, manifest.vocab_size, manifest.row_length, group.world_size, 1, state, backend, group.device.type)
        taken = needs.gradients + needs.optimizer + needs.average + needs.tree
        self._taken = torch.empty(taken, dtype=torch.uint8, device=group.device)

    def __call__(self, rows: int) -> None:
        """One forward and backward pass over `rows` rows of padding."""
        config, backend = self._context.config, self._context.backend
        by_sequence = config.loss.normalise == "sequences"
        empty = empty_micro_batch(rows, self._context.manifest.row_length, backend, with_weights=by_sequence)
        try:
            forward_pass(self._loss, empty, config, self._context.group.device, backend).backward()  # type: ignore[no-untyped-call]
        finally:
            self._loss.zero_grad(set_to_none=True)


def _with(context: RunContext, micro: int) -> RunContext:
    batch = BatchConfig(global_rows=context.config.batch.global_rows, micro=micro)
    return replace(context, config=context.config.model_copy(update={"batch": batch}))
