"""Weights and optimizer state in parts, one for each rank, for models that do not fit one GPU: `parallel = fsdp`.

PyTorch's FSDP2 cuts every weight along its first axis. A decoder layer's parts are gathered before its forward and before its
backward pass and let go after each; the embedding, the last norm and the output matrix stay gathered from the forward to the
backward pass. Gradients are averaged over the ranks, and each rank keeps those of its own parts (Rajbhandari et al., 2020:
ZeRO, stage 3).

Everything here that gathers is collective: all ranks call it, in the same order, the same number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from common.errors import CheckpointError, ConfigError
from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.model.parameters import parameters_by_name

__all__ = ["ShardedModule", "check_parallel", "distribute_like", "full_tensors", "gathered", "load_full", "shard"]

_ResultT = TypeVar("_ResultT")


class ShardedModule(FSDPModule, nn.Module):
    """For types only: what `shard` makes of a module, in place."""


def check_parallel(config: TrainConfig, group: Group) -> None:
    """Refuses a global batch that FSDP cannot share out: all ranks gather weights for every micro-batch, so each needs as many.

    Raises:
        ConfigError: the ranks' numbers of micro-batches would differ.
    """
    batch = config.batch
    if config.parallel == "fsdp" and batch.micro_batches % group.world_size:
        raise ConfigError(
            f"parallel = fsdp needs as many micro-batches on each rank, and batch.global_rows = {batch.global_rows} with "
            f"batch.micro = {batch.micro} make {batch.micro_batches} for {group.world_size} ranks; choose batch.global_rows as a "
            f"multiple of {batch.micro_rows * group.world_size}, another batch.micro, or parallel = ddp"
        )


def shard(module: nn.Module, group: Group) -> ShardedModule:
    """Spreads a module over the ranks, in place, and moves it to the group's device, part by part.

    Each element of the outermost module lists (the decoder's layers) is gathered for itself, and the rest together with
    `module`. Whatever uses the rest must therefore run inside `module.forward`, or inside `gathered`. Weights that are shared,
    as tied embeddings are, stay shared.

    Weights are gathered, and gradients averaged, in fp32. Gathering them in bf16 would halve the traffic, and it would round
    the norms' weights and the residual stream, which autocast leaves in fp32: `parallel` then changed the numbers of a run.

    Args:
        module: the root, with the same whole weights on every rank. It may be on the CPU still: then a GPU never holds all of
            it. Its optimizer is built afterwards.
        group: two ranks or more.

    Raises:
        ConfigError: the module has no list of layers.
    """
    blocks = _blocks(module)
    if not blocks:
        raise ConfigError(
            f"parallel = fsdp gathers one layer at a time, and {type(module).__name__} has no torch.nn.ModuleList of layers; "
            "put the model's layers into one, or use parallel = ddp"
        )
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, group.device.type)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    sharded = cast(ShardedModule, fully_shard(module, mesh=mesh))
    # Without a backward pass to come, the root would stay gathered, and whoever asks for parameters would get other ones.
    sharded.register_forward_hook(_let_go_after_forward)
    root = cast(Any, sharded)  # for nn.Module's types, an attribute is a tensor or a module
    root.visited, root.visit = False, MethodType(_visit, sharded)
    register_fsdp_forward_method(sharded, "visit")
    return sharded


def gathered(module: nn.Module, action: Callable[[], _ResultT]) -> _ResultT:
    """Runs `action`, without gradients, while parts of a sharded `module` can be called, such as the model without its loss.

    The layers are still gathered one by one as they are called. Every rank must run the same forward passes. Any other module
    needs nothing, and `action` is merely called.
    """
    with torch.no_grad():
        if not isinstance(module, FSDPModule):
            return action()
        try:
            return cast(_ResultT, cast(Any, module).visit(action))
        except BaseException:
            module.reset_iter_state()
            raise
        finally:
            module.reshard()


def full_tensors(tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Copies of whole tensors on the CPU, on rank 0; other ranks get an empty dictionary.

    One tensor is gathered at a time, so that a device needs room for the largest one only. Tensors that are whole on every
    rank, such as step counters, are copied from rank 0.
    """
    full = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if group.is_main:
            full[name] = whole.detach().to("cpu", copy=True)
    return full


def load_full(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies whole weights by name into a model, sharded or not; every rank passes the same and takes its part of each.

    Raises:
        CheckpointError: names or shapes are not those of the model; nothing is copied.
    """
    parameters = parameters_by_name(model)
    held, saved = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (parameters, tensors))
    if wrong := sorted(name for name in held.keys() | saved.keys() if held.get(name) != saved.get(name)):
        name = wrong[0]
        raise CheckpointError(
            f"{len(wrong)} weights of the checkpoint are not those of the model, such as {name}: {_shape(saved.get(name))} is "
            f"saved, {_shape(held.get(name))} is needed; continue with the settings that wrote it, or start a new run"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_like(parameter, tensors[name]))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else "x".join(map(str, shape)) or "a number"


def distribute_like(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Optimizer state, or averaged weights, in the form in which they are kept beside a sharded model.

    Args:
        parameters: the weights by name.
        tensors: whole tensors by `<weight>/<kind>` or `<weight>`, the same on every rank. Those with the shape of their weight are
            cut as it is, others, such as step counters, stay whole.
    """
    distributed = {}
    for key, tensor in tensors.items():
        parameter = parameters[key.partition("/")[0]]
        distributed[key] = _like(parameter, tensor) if tensor.shape == parameter.shape else tensor
    return distributed


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The elements of the module lists that are not inside another module list."""
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
    return blocks


def _let_go_after_forward(module: nn.Module, _arguments: object, _result: object) -> None:
    if not torch.is_grad_enabled() and not cast(Any, module).visited:
        cast(FSDPModule, module).reshard()


def _visit(module: nn.Module, action: Callable[[], _ResultT]) -> _ResultT:
    """A second forward method of the root, which calls anything: FSDP gathers the root for it as for `forward`."""
    root = cast(Any, module)
    root.visited = True
    try:
        return action()
    finally:
        root.visited = False


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole`, cut as `parameter` is; without communication, because every rank has it."""
    if not isinstance(parameter, DTensor):
        return whole
    on_device = whole.to(parameter.device, parameter.dtype)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
