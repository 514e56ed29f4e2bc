from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters in the order of their names. A shared parameter appears once, under its first name."""
    return dict(sorted(model.named_parameters()))


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local")  # not `isinstance`: to import DTensor takes 0.7 s of CPU, and only FSDP needs it
