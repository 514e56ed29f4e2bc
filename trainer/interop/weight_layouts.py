"""The weights of models whose files have them in another form: GPT-2, Phi-3 and Gemma in Hugging Face transformers.

In a GPT-2 q, k and v are one matrix, matrices of layers are transposed, and a model without biases gets biases of zero. In a Phi-3
q, k and v are one matrix, and gate and up. In a Gemma the weights of norms are less by one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.config import ModelConfig

EMBEDDING = "transformer.wte.weight"
_OF_LAYER = {
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
_OTHERS = {
    EMBEDDING: "model.embed_tokens.weight",
    "transformer.wpe.weight": "model.embed_positions.weight",
    "lm_head.weight": "lm_head.weight",
}


def to_gpt2(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors by their names there, also of weights on the device `meta`."""
    found = {there: weights[here] for there, here in _OTHERS.items() if here in weights}
    for there, parts in _modules(model).items():
        weight = torch.cat([weights[f"{part}.weight"] for part in parts])
        biases = [weights[f"{part}.bias"] for part in parts if f"{part}.bias" in weights]
        found[f"{there}.bias"] = torch.cat(biases) if biases else weight.new_zeros(len(weight))
        found[f"{there}.weight"] = weight.T.contiguous() if weight.ndim == 2 else weight
    return found


def from_gpt2(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the weights by their names here. `tensors` are those that `to_gpt2` returns for a model with biases."""
    found = {here: tensors[there] for there, here in _OTHERS.items() if there in tensors}
    for there, parts in _modules(model).items():
        for kind in ("weight", "bias"):
            pieces = tensors[f"{there}.{kind}"].t().chunk(len(parts))
            found |= {f"{part}.{kind}": piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    return found


def published_shapes(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the weights of any model by their names in transformers. `shapes` has them by the names here."""
    if not model.is_gpt2:
        return shapes
    tensors = to_gpt2({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, model)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _modules(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return for each module there the modules here that it consists of."""
    layers = {
        f"transformer.h.{number}.{there}": tuple(f"model.layers.{number}.{part}" for part in parts)
        for number in range(model.layers)
        for there, parts in _OF_LAYER.items()
    }
    return {**layers, "transformer.ln_f": ("model.norm",)}


_PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def fused_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by the names there. `shapes` has them by the names here."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, *others) in shapes.items():
        fused = _fused_name(name)
        found[fused] = (found.get(fused, (0,))[0] + rows, *others)
    return found


def from_fused(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(_fused_name(name), []).append(name)
    found: dict[str, Tensor] = {}
    for fused, names in parts.items():
        ordered = sorted(names, key=_place)
        pieces = torch.split(tensors[fused], [shapes[name][0] for name in ordered])
        found |= {name: piece.contiguous() for name, piece in zip(ordered, pieces, strict=True)}
    return found


def _fused_name(name: str) -> str:
    for fused, parts in _PARTS.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, fused)
    return name


def _place(name: str) -> int:
    return next((place for parts in _PARTS.values() for place, part in enumerate(parts) if f".{part}." in name), 0)


OWN_NORM = "pre_feedforward_layernorm.weight"


def to_gemma(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight - 1 if weight.ndim == 1 else weight for name, weight in weights.items()}


def from_gemma(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
