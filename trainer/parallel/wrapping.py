from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import ConfigError
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.machine.memory import fits_in_memory
from trainer.model.decoder import Decoder
from trainer.model.forward import LossModule, empty_micro_batch, forward_pass
from trainer.model.parameters import parameters_by_name
from trainer.parallel.accumulation import (
    Accumulation,
    DdpAccumulation,
    FsdpAccumulation,
    LateAccumulation,
    wrapped_by_ddp,
)
from trainer.parallel.fsdp import shard
from trainer.parallel.gradient_tree import GradientTree


class MicroTooLarge(Exception):  # noqa: N818 - not an error: smaller micro-batches follow
    """A pass over a micro-batch of padding ran out of memory on a rank. Raised on all ranks."""


def wrap_for_training(loss: LossModule, context: RunContext) -> tuple[nn.Module, Accumulation]:
    """Return the model with its loss, compiled and distributed. Raises MicroTooLarge if a trial pass runs out of memory."""
    config, group = context.config, context.group
    with_fsdp = config.parallel == "fsdp" and group.world_size > 1
    if config.compiles(group.device.type):
        _compile(loss, config, with_fsdp=with_fsdp)
    if with_fsdp:
        sharded = shard(loss, group)
        return sharded, FsdpAccumulation(sharded, list(loss.parameters()))
    parameters = [one for one in parameters_by_name(loss.model).values() if one.requires_grad]
    if config.reproducibility == "elastic":
        if group.world_size & (group.world_size - 1):
            raise ConfigError(
                f"reproducibility = elastic adds gradients in a binary tree, and {group.world_size} ranks are not a power of two; "
                "start 1, 2, 4 or 8 ranks (any power of two up to the number of micro-batches)"
            )
        return loss, GradientTree(parameters, group)
    if group.world_size == 1:
        return loss, Accumulation(parameters)
    if context.custom_step:
        return loss, LateAccumulation(parameters, group)
    device_ids = [group.device] if group.device.type == "cuda" else None
    module = wrapped_by_ddp(loss, device_ids=device_ids)
    accumulation = DdpAccumulation(module, parameters)
    _settle_buckets(module, accumulation, context)
    return module, accumulation


def _compile(loss: LossModule, config: TrainConfig, *, with_fsdp: bool) -> None:
    reuse_traced_graphs()
    by_layer = with_fsdp or config.compile == "layers"  # FSDP's exchanges run between the layers
    if by_layer and isinstance(loss.model, Decoder):
        for layer in loss.model.model.layers:
            layer.compile(dynamic=False)
    elif not with_fsdp:
        loss.compile(dynamic=False)


def reuse_traced_graphs() -> None:
    """Make PyTorch keep the forward and backward graphs of the model for later starts, as it keeps the code that is made of them.

    By default it does not keep graphs with autocast or an autograd function. They are safe to keep: the arguments of autocast, and
    the operators of both passes of the function, are part of the graph from which the key is made.
    """
    functions = ("_enter_autocast", "_exit_autocast")
    torch._inductor.config.unsafe_marked_cacheable_functions |= {f"torch.amp.autocast_mode.{name}": "" for name in functions}
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def _settle_buckets(module: DistributedDataParallel, accumulation: DdpAccumulation, context: RunContext) -> None:
    """Run passes over an empty batch, so that gradients are added in the same order in a new run and in a resumed one.

    With three or more ranks the order of addition depends on DDP's buckets: see `DdpAccumulation.settle`. A pass without an
    exchange comes first: if the micro-batch is too large, this pass finds it before a rank can wait for another one.
    """
    config, group, backend = context.config, context.group, context.backend
    by_sequence = config.loss.reduction == "sequences"
    empty = empty_micro_batch(config.batch.micro_rows, context.manifest.row_length, backend, with_weights=by_sequence)

    def backward() -> None:
        try:
            forward_pass(module, empty, config, group.device, backend).backward()
        finally:
            module.zero_grad(set_to_none=True)

    def backward_alone() -> None:
        with module.no_sync():
            backward()

    for fits in chain([fits_in_memory(backward_alone)], accumulation.settle(backward)):
        if not group.smallest(fits):
            raise MicroTooLarge
