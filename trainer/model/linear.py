"""Linear layers that use the faster library for their fp32 products on a CPU, or float8 on a GPU.

On x86 PyTorch computes the fp32 products of `nn.Linear` with MKL, and 16-bit products with oneDNN. On Intel processors MKL is up to
1.2 times as fast as oneDNN. On others oneDNN is faster: 2.0 to 2.4 times forward and for the gradient of the input, and 1.5 to 2.0
times for the gradient of the weight, where both factors are transposed (768x128 to 2048x1024, one core of an EPYC 9005, torch 2.13,
2026-11-27). For a few rows it is faster only if the weights are in its own layout (8 rows: 2.2 to 2.8 times).

float8 is computed by torchao, which is optional. Inputs, weights and gradients of the layers' matrix products are cast to eight
bits with one scale for each tensor, computed from its current largest value (torchao's "tensorwise" recipe). The result has the
type of the run, and the weights that the optimizer updates stay fp32. Attention, norms, embedding and output projection do not
change.

M rows of the first factor   K inner width   N rows of the second factor
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from common.errors import ConfigError
from trainer.machine.environment import from_cpuinfo

_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_IS_INTEL = from_cpuinfo("vendor_id") == ["GenuineIntel"]
PRODUCTS = "MKL" if _IS_INTEL and _HAS_MKL else "oneDNN" if _HAS_ONEDNN else "PyTorch's default"
"""The library of fp32 products on this CPU."""
_FEWEST_ROWS, _FEWEST_PACKED = 32, 2
"""With fewer rows the setup of oneDNN takes longer than the product."""
_PACKED: ContextVar[Mapping[Tensor, Tensor]] = ContextVar("packed", default=MappingProxyType({}))
_NEEDED_CAPABILITY = (8, 9)  # compute capability of Ada Lovelace, the first GPUs whose tensor cores multiply float8
_MULTIPLE = 16
_INSTEAD = "use precision = bf16"


class Linear(nn.Linear):
    """`nn.Linear` whose bias is zero at first; results are equal up to rounding."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return multiplied(x, self.weight, self.bias)


def multiplied(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return `x @ weight^T + bias` over the last axis. Those of the three that need a gradient get one."""
    if torch.is_grad_enabled() and _suits(x, weight_NK):
        return cast(Tensor, _Linear.apply(x, weight_NK, bias_N))  # type: ignore[no-untyped-call]
    return product(x, weight_NK, bias_N)


def product(a: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return `a @ b^T + bias`. A product of oneDNN has no gradient; the caller computes it."""
    return _by_onednn(a, _PACKED.get().get(b_NK, b_NK), bias_N) if _suits(a, b_NK) else functional.linear(a, b_NK, bias_N)


def packed_weights(model: nn.Module, num_rows: int) -> dict[Tensor, Tensor]:
    """Return the weights that oneDNN multiplies in its own layout, each with its copy there. The copies need as much memory again.

    `num_rows` is the usual number of rows of the other factor. There are none where oneDNN would not be faster.
    """
    weights = [layer.weight for layer in model.modules() if isinstance(layer, Linear)]
    if PRODUCTS != "oneDNN" or num_rows < _FEWEST_PACKED:
        return {}
    return {
        weight_NK: torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), num_rows)
        for weight_NK in weights
        if weight_NK.is_cpu and weight_NK.dtype == torch.float32 and type(weight_NK.data) is Tensor  # not divided by FSDP
    }


@contextmanager
def multiplied_packed(packed: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Use `packed_weights`, which are those of the time when they were packed. There are no gradients."""
    token = _PACKED.set(packed)
    try:
        yield
    finally:
        _PACKED.reset(token)


def add_product(sum_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> None:
    """Add `a @ b^T` in place."""
    if _suits(a_MK, b_NK):
        sum_MN.add_(_by_onednn(a_MK, b_NK, None))
    else:
        sum_MN.addmm_(a_MK, b_NK.T)


def product_operators() -> list[Any]:
    """Return the operators that compute products. Selective activation checkpointing keeps their outputs."""
    aten = torch.ops.aten
    operators = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    return [*operators, torch.ops.mkldnn._linear_pointwise.default] if _HAS_ONEDNN else operators


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_NK)  # a frozen weight needs no input
        return _by_onednn(x, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad_x = product(grad, weight_NK.T) if for_x else None
        grad_weight = product(grad.flatten(0, -2).T, x.flatten(0, -2).T) if for_weight else None
        return grad_x, grad_weight, grad.flatten(0, -2).sum(0) if for_bias else None


def _by_onednn(a: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(a, b_NK, bias_N, "none", [], ""))


def _suits(a: Tensor, b_NK: Tensor) -> bool:
    return (
        PRODUCTS == "oneDNN"
        and not torch.compiler.is_compiling()
        and a.is_cpu
        and a.dtype == b_NK.dtype == torch.float32
        and a.shape[-1] == b_NK.shape[-1] > 0
        and a.numel() >= (_FEWEST_PACKED if b_NK in _PACKED.get() else _FEWEST_ROWS) * a.shape[-1]
        and not torch.is_autocast_enabled("cpu")
    )


def convert_to_float8(model: nn.Module, device: torch.device, capability: tuple[int, int] | None = None) -> tuple[str, ...]:
    """Replace linear layers of the list `layers` in place, and return their names. Call this before the model is compiled.

    The parameters stay the same objects under the same names. A layer whose widths are not both multiples of 16 stays.
    """
    if device.type != "cuda":
        raise ConfigError(f"precision = float8 needs a GPU, but the device is {device.type}; {_INSTEAD}")
    found = capability or torch.cuda.get_device_capability(device)
    if found < _NEEDED_CAPABILITY:
        raise ConfigError(
            f"precision = float8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell), and this one has "
            f"{found[0]}.{found[1]}; {_INSTEAD}"
        )
    try:
        torchao = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(
            f"precision = float8 needs torchao ({error}); `pip install torchao==0.18.0` fits torch 2.11 to 2.13, or {_INSTEAD}"
        ) from error
    names = tuple(name for name, module in model.named_modules() if _qualifies(module, name))
    if not names:
        raise ConfigError(
            "precision = float8 found no linear layer in the decoder layers whose widths are both multiples of "
            f"{_MULTIPLE}; change model.width, model.head_dim and model.mlp_width, or {_INSTEAD}"
        )
    # The inner width of the weight's gradient is the number of tokens of a micro-batch, which may be no multiple of 16.
    config = torchao.Float8LinearConfig(pad_inner_dim=True)
    torchao.convert_to_float8_training(model, module_filter_fn=_qualifies, config=config)
    return names


def _qualifies(module: nn.Module, name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and "layers" in name.split(".")
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
