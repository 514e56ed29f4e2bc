"""Low-rank adapters of the layers' matrices (LoRA, Hu et al., 2021, section 4.1).

A matrix W with an adapter computes `W x + factor * B A x`, with factor = alpha / rank. W is frozen, and A and B are trained. B is
zero at first, so a new model computes exactly what the model without adapters does.

    R rank   I width of the input   O width of the output
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from trainer.config import LoraConfig, ModelConfig
from trainer.config.finetuning import PROJECTIONS
from trainer.model.cost import FP32_BYTES, computed_bytes
from trainer.model.dropout import ADAPTERS, dropout
from trainer.model.linear import Linear, multiplied

_A, _B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of A and B. The names are those of the package PEFT without its prefix, so an export only copies them."""


class LoraLinear(nn.Module):
    def __init__(self, base: Linear, lora: LoraConfig, site: int) -> None:
        super().__init__()
        assert lora.rank is not None
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = Linear(base.in_features, lora.rank)
        self.lora_B = Linear(lora.rank, base.out_features)
        self.factor, self.dropout, self.site = lora.factor, lora.dropout, site

    def forward(self, x: Tensor, keys_B: Tensor | None = None) -> Tensor:
        inner = self.lora_A(dropout(x, self.dropout, keys_B, self.site)) * self.factor
        return multiplied(x, self.weight, self.bias) + cast(Tensor, self.lora_B(inner))


def projected(projection: nn.Module, x_BLD: Tensor, keys_B: Tensor | None) -> Tensor:
    return cast(Tensor, projection(x_BLD, keys_B) if isinstance(projection, LoraLinear) else projection(x_BLD))


def add_adapters(model: nn.Module, lora: LoraConfig, seed: int, *, trained: Collection[str] = ()) -> None:
    """Give the model its adapters, and freeze all its other parameters except `trained`. Do nothing without `lora.rank`.

    A is uniform in +-1/sqrt(I), as in the code of the paper's authors and in PEFT, and depends only on the seed. B is zero.
    Raises ConfigError if the model has no such matrices.
    """
    if lora.rank is None:
        return
    places = [
        (parent, name)
        for _, parent in sorted(model.named_modules())
        for name, child in parent.named_children()
        if name in lora.targets and isinstance(child, Linear)
    ]
    if not places:
        raise ConfigError(
            f"lora.targets = {' '.join(lora.targets)}: the model has no such matrices; adapters need the built-in decoder, or a "
            "model that is made of its layers"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"lora {seed}".encode()).digest()[:7]))
    for parent, name in places:
        adapted = LoraLinear(cast(Linear, getattr(parent, name)), lora, ADAPTERS + PROJECTIONS.index(name))
        bound = 1 / math.sqrt(adapted.lora_A.in_features)
        with torch.no_grad():
            adapted.lora_A.weight.uniform_(-bound, bound, generator=generator)
            adapted.lora_B.weight.zero_()
        setattr(parent, name, adapted)


def adapter_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters() if is_adapter(name))


def is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def num_adapter_weights(model: ModelConfig, lora: LoraConfig) -> int:
    return model.layers * (lora.rank or 0) * sum(sum(widths) for widths in _adapted(model, lora))


def adapter_activation_bytes(model: ModelConfig, lora: LoraConfig, *, mixed: bool) -> int:
    """Return the bytes that the adapters of one layer keep for one token: A x, and with dropout its dropped input and mask."""
    if lora.rank is None:
        return 0
    adapted = _adapted(model, lora)
    inputs = sum(width for width, _ in adapted) if lora.dropout else 0
    return computed_bytes(mixed=mixed) * lora.rank * len(adapted) + (FP32_BYTES + 1) * inputs


def _adapted(model: ModelConfig, lora: LoraConfig) -> list[tuple[int, int]]:
    return [widths for name, widths in model.projections.items() if name in lora.targets]


def merged_weights(weights: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Return the weights of a model without adapters that computes the same up to rounding: W + factor * B A.

    Each element is the sum over the rank in order, in fp64, and is then rounded to fp32. The products are exact, and the order is
    fixed, so the result has the same bits on every machine. Raises CheckpointError if the weights do not fit the settings.
    """
    adapted = sorted(name.removesuffix(_B) for name in weights if name.endswith(_B))
    if bool(adapted) != (lora.rank is not None):
        found = f"{len(adapted)} adapters" if adapted else "no adapters"
        raise CheckpointError(
            f"the settings have lora.rank = {'none' if lora.rank is None else lora.rank}, and the checkpoint has {found}; "
            "restore config.toml of the run from a copy"
        )
    merged = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name in adapted:
        a_RI, b_OR, weight_OI = (weights.get(name + end, torch.empty(0)) for end in (_A, _B, ".weight"))
        num_out, num_in = weight_OI.shape if weight_OI.ndim == 2 else (-1, -1)
        if (a_RI.shape, b_OR.shape) != ((lora.rank, num_in), (num_out, lora.rank)):
            raise CheckpointError(f"the adapter of {name} does not fit its matrix or lora.rank; restore the checkpoint from a copy")
        product_OI = torch.zeros(weight_OI.shape, dtype=torch.float64)
        for b_O, a_I in zip(b_OR.double().T, a_RI.double(), strict=True):
            product_OI.addr_(b_O, a_I)
        merged[f"{name}.weight"] = product_OI.mul_(lora.factor).add_(weight_OI).to(weight_OI.dtype)
    return merged
