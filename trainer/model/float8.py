"""float8 matrix products by torchao, which is optional and which this module alone imports.

Inputs, weights and gradients of the layers' matrix products are cast to eight bits with one scale for each tensor, taken from its
largest value at the time (torchao's "tensorwise" recipe); the result is in the type of the run, and the weights that the
optimizer updates stay fp32. Attention, norms, embedding and output projection are not touched.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import nn

from common.errors import ConfigError

__all__ = ["convert_to_float8"]

_NEEDED_CAPABILITY = (8, 9)
"""Ada Lovelace; the first GPUs whose tensor cores multiply float8."""

_MULTIPLE = 16
"""Both widths of a float8 product must divide by this."""

_INSTEAD = "use precision = bf16"


def convert_to_float8(model: nn.Module, device: torch.device, capability: tuple[int, int] | None = None) -> tuple[str, ...]:
    """Replaces linear layers inside the decoder layers by float8 ones, in place, and returns their names.

    The parameters are the same objects under the same names, so weights are loaded and saved as ever. To be called before
    the model is compiled or wrapped. A layer stays as it is where one of its widths is no multiple of 16.

    Args:
        model: holds its decoder layers in a module list called `layers`.
        device: where it will run.
        capability: compute capability of that GPU; none: asked of the driver.

    Raises:
        ConfigError: there is no GPU, it has no float8 tensor cores, torchao is missing, or no layer can be converted.
    """
    if device.type != "cuda":
        raise ConfigError(f"precision = float8 needs a GPU and the device is {device.type}; {_INSTEAD}")
    found = capability or torch.cuda.get_device_capability(device)
    if found < _NEEDED_CAPABILITY:
        raise ConfigError(
            f"precision = float8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell), and this one has "
            f"{found[0]}.{found[1]}; {_INSTEAD}"
        )
    torchao = _torchao_float8()
    names = tuple(name for name, module in model.named_modules() if _qualifies(module, name))
    if not names:
        raise ConfigError(
            "precision = float8 found no linear layer in the decoder layers whose widths are both multiples of "
            f"{_MULTIPLE}; change model.width, model.head_dim and model.mlp_width, or {_INSTEAD}"
        )
    # Tokens of a micro-batch are the inner width of the weight's gradient, and need not be a multiple of 16.
    config = torchao.Float8LinearConfig(pad_inner_dim=True)
    torchao.convert_to_float8_training(model, module_filter_fn=_qualifies, config=config)
    return names


def _torchao_float8() -> ModuleType:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(
            f"precision = float8 needs torchao ({error}); `pip install torchao==0.18.0` suits torch 2.11 to 2.13, or {_INSTEAD}"
        ) from error


def _qualifies(module: nn.Module, name: str) -> bool:
    """Whether a module of the model is a linear layer of a decoder layer that float8 products can take."""
    return (
        isinstance(module, nn.Linear)
        and "layers" in name.split(".")
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
