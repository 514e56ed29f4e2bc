"""Parts of attention by their formulas, where no kernel has them.

P documents (or whole rows)   N heads   Q tokens of a document, as queries and as keys   S keys   H width of a head
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)`, or x if `cap` is 0 (Gemma Team, 2024, Gemma 2)."""
    return torch.tanh(x / cap) * cap if cap else x


def probabilities(q_PNQH: Tensor, k_PNSH: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return those of attention, (P, N, Q, S), fp32. `mask` has bools that broadcast to this: which keys a query sees."""
    scores = soft_cap((q_PNQH * q_PNQH.shape[-1] ** -0.5) @ k_PNSH.transpose(-1, -2), cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)


def causal_mask(length: int, window: int) -> Tensor:
    """Return which keys a query of a document sees, on the CPU, (Q, Q). A `window` above 0 limits them to the last ones."""
    places_Q = torch.arange(length)
    distances_QQ = places_Q[:, None] - places_Q
    return (distances_QQ >= 0) & (distances_QQ < window) if window else distances_QQ >= 0
