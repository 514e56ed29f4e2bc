"""How a run's numbers are turned and kept, the same wherever it is done."""

from __future__ import annotations

import math

__all__ = ["perplexity"]

_LARGEST_EXPONENT = 700
"""exp of much more is beyond fp64."""


def perplexity(loss: float) -> float:
    """`exp(loss)` of a mean in nats, infinite where that overflows; NaN stays NaN."""
    return math.exp(loss) if not loss >= _LARGEST_EXPONENT else math.inf
