"""Weights and optimizer state sharded over the ranks, for models that do not fit one GPU: `parallel = fsdp`.

PyTorch's FSDP2 splits every weight along its first axis. The parts of a decoder layer are gathered before its forward pass and
before its backward pass, and released after each. Embedding, last norm and output matrix stay gathered from the forward to the
backward pass. Gradients are averaged over the ranks, and each rank keeps those of its part (Rajbhandari et al., 2020: ZeRO,
stage 3).

All functions that gather are collective: all ranks must call them in the same order and equally often.

PyTorch's modules for it take 0.7 s of CPU to import, so only `shard` imports them. Without them no tensor is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from trainer.config import BatchConfig
from trainer.distributed.group import Group
from trainer.model.parameters import is_sharded, parameters_by_name

_ResultT = TypeVar("_ResultT")

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    class ShardedModule(FSDPModule, nn.Module):
        """The type of a module after `shard`."""


def check_parallel(parallel: str, batch: BatchConfig, num_ranks: int) -> None:
    """Refuse a global batch that FSDP cannot divide: all ranks gather weights for each micro-batch, so each needs as many."""
    if parallel == "fsdp" and batch.micro_batches % num_ranks:
        raise ConfigError(
            "parallel = fsdp needs equally many micro-batches on each rank, and batch.global_batch_size = "
            f"{batch.global_batch_size} with batch.micro_batch_size = {batch.micro_batch_size} make {batch.micro_batches} "
            f"for {num_ranks} ranks; choose batch.global_batch_size as a multiple of {batch.micro_rows * num_ranks}, "
            "another batch.micro_batch_size, or parallel = ddp"
        )


def shard(module: nn.Module, group: Group) -> ShardedModule:
    """Shard a module over two ranks or more in place, and move each part to the device of the group. Each element of the outermost
    module lists (the decoder's layers) is gathered separately, and all other weights together. Code that uses the other weights
    must run inside `module.forward` or `gathered`. Every rank passes the same whole weights; if they are on the CPU, a GPU never
    holds the whole module. Build the optimizer after this call. Weights are gathered and gradients averaged in fp32: bf16 would
    halve the traffic, but round weights that autocast keeps in fp32, so `parallel` would change the numbers of a run.
    """
    blocks = _blocks(module)
    if not blocks:
        raise ConfigError(
            f"parallel = fsdp gathers one layer at a time, and {type(module).__name__} has no torch.nn.ModuleList of layers; "
            "put the model's layers into one, or use parallel = ddp"
        )
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, group.device.type)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    sharded = cast("ShardedModule", fully_shard(module, mesh=mesh))
    is_visited = False

    def reshard_after_forward(module: nn.Module, _arguments: object, _result: object) -> None:
        # Without a backward pass the root would stay gathered, and its parameters would not be the sharded ones.
        if not torch.is_grad_enabled() and not is_visited:
            cast(FSDPModule, module).reshard()

    def visit(_module: nn.Module, action: Callable[[], _ResultT]) -> _ResultT:
        """Call `action` as a second forward method of the root. FSDP gathers the root for it as for `forward`."""
        nonlocal is_visited
        is_visited = True
        try:
            return action()
        finally:
            is_visited = False

    sharded.register_forward_hook(reshard_after_forward)
    cast(Any, sharded).visit = MethodType(visit, sharded)  # nn.Module types attributes as tensors or modules
    register_fsdp_forward_method(sharded, "visit")
    return sharded


def gathered(module: nn.Module, action: Callable[[], _ResultT]) -> _ResultT:
    """Run `action` without gradients. It may call submodules of a sharded `module`, such as the model without its loss.

    Layers are still gathered one by one as they are called, and every rank must run the same forward passes. If `module` is not
    sharded, this only calls `action`.
    """
    with torch.no_grad():
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # loaded if any module is sharded
        if fsdp is None or not isinstance(module, fsdp.FSDPModule):
            return action()
        try:
            return cast(_ResultT, cast(Any, module).visit(action))
        except BaseException:
            module.reset_iter_state()
            raise
        finally:
            module.reshard()


def full_tensors(tensors: Mapping[str, Tensor], group: Group, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return whole tensors on the CPU on rank 0, nothing on other ranks. One is gathered at a time. Whole ones come from rank 0.

    `into` has memory for the copies on rank 0.
    """
    full = {}
    for name, tensor in tensors.items():
        whole = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()
        if group.is_main:
            full[name] = whole.to("cpu", copy=True) if into is None else into[name].copy_(whole, non_blocking=True)
    if into and group.device.type == "cuda":
        torch.cuda.current_stream(group.device).synchronize()
    return full


def load_full(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    new: Collection[str] = (),
    remedy: str = "continue with the settings that wrote it, or start a new run",
) -> None:
    """Copy whole weights; those of `new` may be missing. If names or shapes differ, copy nothing and raise CheckpointError."""
    parameters = parameters_by_name(model)
    held, saved = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (parameters, tensors))
    kept = set(new).intersection(held) - saved.keys()
    if wrong := sorted(name for name in (held.keys() | saved.keys()) - kept if held.get(name) != saved.get(name)):
        name = wrong[0]
        raise CheckpointError(
            f"{len(wrong)} weights of the checkpoint do not fit the model, such as {name}: saved {_shape(saved.get(name))}, "
            f"needed {_shape(held.get(name))}; {remedy}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in kept:
                parameter.copy_(_like(parameter, tensors[name]))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else "x".join(map(str, shape)) or "a number"


def distribute_like(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return optimizer state or averaged weights (`<weight>/<kind>` or `<weight>`, whole on every rank), sharded like their
    weights. Tensors with another shape, such as step counters, stay whole.
    """
    distributed = {}
    for key, tensor in tensors.items():
        parameter = parameters[key.partition("/")[0]]
        distributed[key] = _like(parameter, tensor) if tensor.shape == parameter.shape else tensor
    return distributed


def _blocks(module: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
    return blocks


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return `whole` sharded like `parameter`. Needs no communication, because every rank has the whole tensor."""
    if not is_sharded(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    on_device = whole.to(parameter.device, parameter.dtype)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
