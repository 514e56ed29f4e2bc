"""Operators of PyTorch for the kernels of `trainer.model.kernels`. A compiled model contains them as they are.

C positions   V vocabulary   B rows   L tokens of a row   N heads   H width of a head   R = B * L * N
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels(device_type: str, kind: torch.dtype) -> bool:
    """Whether the operators take tensors of this type: 16 bits, on a GPU, with Triton, which PyTorch for GPUs brings along."""
    return device_type == "cuda" and kind in (torch.float16, torch.bfloat16) and _HAS_TRITON


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("trainer.model.kernels")  # at first use, because it needs Triton


@torch.library.custom_op("trainer::loss_and_slopes_", mutates_args=("logits_CV",), device_types="cuda")
def loss_and_slopes_(
    logits_CV: Tensor, chosen_C: Tensor, smoothing: float, z_loss: float, temperature: float, slope_scale: float
) -> Tensor:
    """See `kernels.loss_and_slopes_`."""
    return cast(Tensor, _kernels().loss_and_slopes_(logits_CV, chosen_C, smoothing, z_loss, temperature, slope_scale))


@loss_and_slopes_.register_fake
def _(logits_CV: Tensor, *_options: object) -> Tensor:
    return logits_CV.new_empty(len(logits_CV), dtype=torch.float32)


@torch.library.custom_op("trainer::norm_and_rotate", mutates_args=(), device_types="cuda")
def norm_and_rotate(x_BLNH: Tensor, weight_H: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.norm_and_rotate`."""
    return cast("tuple[Tensor, Tensor]", _kernels().norm_and_rotate(x_BLNH.contiguous(), weight_H, cos, sin, eps))


@norm_and_rotate.register_fake
def _(x_BLNH: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_BLNH, memory_format=torch.contiguous_format), x_BLNH.new_empty(
        x_BLNH.shape[:-1].numel(), dtype=torch.float32
    )


@torch.library.custom_op("trainer::norm_and_rotate_backward", mutates_args=(), device_types="cuda")
def _norm_and_rotate_backward(
    grad_BLNH: Tensor, x_BLNH: Tensor, weight_H: Tensor, cos: Tensor, sin: Tensor, factors_R: Tensor
) -> tuple[Tensor, Tensor]:
    gradients = _kernels().norm_and_rotate_backward(grad_BLNH.contiguous(), x_BLNH.contiguous(), weight_H, cos, sin, factors_R)
    return cast("tuple[Tensor, Tensor]", gradients)


@_norm_and_rotate_backward.register_fake
def _(_grad: Tensor, x_BLNH: Tensor, weight_H: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_BLNH, memory_format=torch.contiguous_format), torch.empty_like(weight_H, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_BLNH, weight_H, cos, sin, _ = inputs
    ctx.save_for_backward(x_BLNH, weight_H, cos, sin, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_BLNH: Tensor, _by_factors: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight = _norm_and_rotate_backward(grad_BLNH, *ctx.saved_tensors)
    return grad_x, grad_weight.to(ctx.saved_tensors[1].dtype), None, None, None


norm_and_rotate.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("trainer::embedding_gradient", mutates_args=(), device_types="cuda")
def _embedding_gradient(ids_T: Tensor, grad_TD: Tensor, num_rows: int) -> Tensor:
    return cast(Tensor, _kernels().embedding_gradient(ids_T, grad_TD.contiguous(), num_rows))


@_embedding_gradient.register_fake
def _(_ids: Tensor, grad_TD: Tensor, num_rows: int) -> Tensor:
    return grad_TD.new_empty(num_rows, grad_TD.shape[1], dtype=torch.float32)


class Bf16Embedding(torch.autograd.Function):
    """Rows of a fp32 weight, in bf16. PyTorch's deterministic gradient adds all tokens of an id one after the other."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows = len(weight_VD)
        return functional.embedding(ids, weight_VD).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        return None, _embedding_gradient(ids.flatten(), grad.flatten(0, -2), ctx.num_rows)
