"""Linear layers that use oneDNN for their matrix products on a CPU.

On x86 PyTorch computes the fp32 products of `nn.Linear` with MKL, and 16-bit products with oneDNN. On AMD processors oneDNN is
faster for fp32 too, unless both factors are transposed, as in the gradient of a weight.

M rows of the first factor   K inner width   N rows of the second factor
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_FEWEST_ROWS = 32
"""With fewer rows, for example when tokens are generated one by one, the setup of oneDNN takes longer than the product."""


class Linear(nn.Linear):
    """`nn.Linear` without bias; results are equal up to rounding."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiplied(x, self.weight)


def multiplied(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Return `x @ weight^T` over the last axis. Those of the factors that need a gradient get one."""
    if torch.is_grad_enabled() and _suits(x, weight_NK):
        return cast(Tensor, _Linear.apply(x, weight_NK))  # type: ignore[no-untyped-call]
    return product(x, weight_NK)


def product(a: Tensor, b_NK: Tensor) -> Tensor:
    """Return `a @ b^T`. A product of oneDNN has no gradient; the caller computes it."""
    return _by_onednn(a, b_NK) if _suits(a, b_NK) else functional.linear(a, b_NK)


def product_operators() -> list[Any]:
    """Return the operators that compute products. Selective activation checkpointing keeps their outputs."""
    aten = torch.ops.aten
    operators = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    return [*operators, torch.ops.mkldnn._linear_pointwise.default] if _HAS_ONEDNN else operators


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_NK)  # a frozen weight needs no input
        return _by_onednn(x, weight_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        grad_x = product(grad, weight_NK.T) if for_x else None
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2) if for_weight else None
        return grad_x, grad_weight


def _by_onednn(a: Tensor, b_NK: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(a, b_NK, None, "none", [], ""))


def _suits(a: Tensor, b_NK: Tensor) -> bool:
    return (
        a.is_cpu
        and a.dtype == b_NK.dtype == torch.float32
        and a.shape[-1] == b_NK.shape[-1] > 0
        and a.numel() >= _FEWEST_ROWS * a.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and _HAS_ONEDNN
    )
