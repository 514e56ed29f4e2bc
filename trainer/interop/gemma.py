"""The weights of norms in a Gemma: there they are less by one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

OWN_NORM = "pre_feedforward_layernorm.weight"


def to_gemma(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight - 1 if weight.ndim == 1 else weight for name, weight in weights.items()}


def from_gemma(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
