"""Rotary frequencies that are scaled for longer contexts, as published models do it. The names are those of transformers.

linear: all are divided by `factor` (Chen et al., 2023). llama3: long wavelengths are, and those between two bounds in part (Llama
3.1). yarn: the same by the number of rotations in the original context, and longer queries and keys (Peng et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def scaled_frequencies(frequencies: Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return the frequencies, and the factor of cosine and sine. `scaling` is `model.rope_scaling`."""
    kind = scaling.get("rope_type")
    if kind is None:
        return frequencies, 1.0
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor, 1.0
    original = float(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        share = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return frequencies * share + frequencies / factor * (1 - share), 1.0
    size = 2 * len(frequencies)

    def place_of(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place_of(float(scaling.get("beta_fast", 32))), place_of(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    places = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    share = 1 - ((places - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * share + frequencies / factor * (1 - share), _length_factor(factor, scaling)


def _length_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def length(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return length(float(scaling["mscale"])) / length(float(scaling["mscale_all_dim"]))
    return length()
