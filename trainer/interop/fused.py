"""The weights of Phi-3: there q, k and v are one matrix, and gate and up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
