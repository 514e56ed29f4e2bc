"""Smaller weights of a trained model: quantised or pruned, and what that costs."""

from typing import Literal

Method = Literal["int8", "int4", "prune", "prune-2-4"]
