"""How a run's numbers are turned and kept, the same wherever it is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["perplexity", "plain"]

_LARGEST_EXPONENT = 700
"""exp of much more is beyond fp64."""


def perplexity(loss: float) -> float:
    """`exp(loss)` of a mean in nats, infinite where that overflows; NaN stays NaN."""
    return math.exp(loss) if not loss >= _LARGEST_EXPONENT else math.inf


def plain(value: Any) -> Any:
    """A value for JSON, which has no word for a number that is not finite; a text keeps it visible for every parser."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value
