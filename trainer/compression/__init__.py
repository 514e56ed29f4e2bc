"""Smaller weights of a trained model: quantised or pruned, and what that costs."""

from __future__ import annotations

from typing import Literal

__all__ = ["Method"]

Method = Literal["int8", "int4", "prune", "prune-2-4"]
