"""`batch.micro = auto`: from an estimate of the memory to a size that was tried on the device, the same on every rank."""

from __future__ import annotations

import logging
from functools import partial

import torch

from data_pipeline.dataset.manifest import Manifest
from trainer.attention import Backend
from trainer.config import BatchConfig, TrainConfig
from trainer.distributed.group import Group
from trainer.extension import Extension, seeded_model
from trainer.memory import available_bytes, choose_micro, estimate, micro_candidates, probe
from trainer.step import LossModule, empty_micro_batch, forward_pass

__all__ = ["with_micro"]

_log = logging.getLogger(__name__)


def with_micro(
    config: TrainConfig, manifest: Manifest, group: Group, backend: Backend, extension: Extension, recorded: int | None
) -> TrainConfig:
    """The settings with `batch.micro` as a number.

    Args:
        config: the settings; where they name a number they are returned as they are.
        manifest: the data.
        group: the ranks, of which the one with the least memory decides.
        backend: of the attention.
        extension: what may replace the model and the loss.
        recorded: the number that the run was begun with; it is taken, because the bits depend on it.

    Raises:
        ConfigError: no size fits.
    """
    if config.batch.micro != "auto":
        return config
    if recorded is not None:
        return _with(config, recorded)
    estimated = partial(
        estimate, config, manifest.vocab_size, manifest.row_length, group.world_size, backend=backend, device_type=group.device.type
    )
    free = group.smallest(available_bytes(group.device, group.local_world_size))
    micro = choose_micro(config, lambda rows: estimated(micro=rows), free, manifest.row_length, group.world_size)
    if config.parallel == "ddp":  # a pass of FSDP is an exchange, in which one rank without memory would leave the others waiting
        candidates = [rows for rows in micro_candidates(config.batch.global_rows, group.world_size) if rows <= micro]
        tried = _Trial(config, manifest, group, backend, extension)
        micro = group.smallest(probe(tried, candidates))
        del tried
    _log.info("batch.micro = auto: %d rows; %s", micro, estimated(micro=micro).describe())
    return _with(config, micro)


class _Trial:
    """Passes of a model that is thrown away, with as much memory taken beside it as the optimizer will need."""

    def __init__(self, config: TrainConfig, manifest: Manifest, group: Group, backend: Backend, extension: Extension) -> None:
        model = seeded_model(extension, config.model, manifest.vocab_size, config.seed).to(group.device)
        self._loss = LossModule(model, config.loss, extension.own_loss)
        self._config, self._manifest, self._group, self._backend = config, manifest, group, backend
        needs = estimate(config, manifest.vocab_size, manifest.row_length, group.world_size, 1, backend, group.device.type)
        taken = needs.gradients + needs.optimizer + needs.average + needs.tree
        self._taken = torch.empty(taken, dtype=torch.uint8, device=group.device)

    def __call__(self, rows: int) -> None:
        """One forward and backward pass over `rows` rows of padding."""
        by_sequence = self._config.loss.normalise == "sequences"
        empty = empty_micro_batch(rows, self._manifest.row_length, self._backend, with_weights=by_sequence)
        try:
            forward_pass(self._loss, empty, self._config, self._group.device, self._backend).backward()  # type: ignore[no-untyped-call]
        finally:
            self._loss.zero_grad(set_to_none=True)


def _with(config: TrainConfig, micro: int) -> TrainConfig:
    return config.model_copy(update={"batch": BatchConfig(global_rows=config.batch.global_rows, micro=micro)})
