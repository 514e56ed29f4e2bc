"""float8 matrix products by torchao. torchao is optional, and only this module imports it.

Inputs, weights and gradients of the layers' matrix products are cast to eight bits with one scale for each tensor, computed from
its current largest value (torchao's "tensorwise" recipe). The result has the type of the run, and the weights that the optimizer
updates stay fp32. Attention, norms, embedding and output projection do not change.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from common.errors import ConfigError

_NEEDED_CAPABILITY = (8, 9)  # compute capability of Ada Lovelace, the first GPUs whose tensor cores multiply float8

_MULTIPLE = 16

_INSTEAD = "use precision = bf16"


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
