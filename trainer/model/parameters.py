from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters in the order of their names. A shared parameter appears once, under its first name."""
    return dict(sorted(model.named_parameters()))


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local")  # not `isinstance`: to import DTensor takes 0.7 s of CPU, and only FSDP needs it


def own_part(tensor: Tensor) -> Tensor:
    """Return the rows that this rank has of a sharded tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin a copy to the host. The function returned waits for it and returns the copy, or the tensor itself if it is there."""
    if not tensor.is_cuda:
        return lambda: tensor
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return on_host

    return wait
