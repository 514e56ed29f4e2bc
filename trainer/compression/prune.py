"""Pruning: the smallest weights of each matrix become zero."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["magnitude_pruned", "two_of_four"]


def magnitude_pruned(weight_NK: Tensor, share: float) -> Tensor:
    """Return a matrix without the given share of its weights, those of the smallest magnitude (Han et al., 2015).

    Of equal magnitudes the earlier weights stay, so the number of zeros is exact.
    """
    num_zeros = round(share * weight_NK.numel())
    order = weight_NK.abs().flatten().sort(descending=True, stable=True).indices
    pruned = weight_NK.clone()
    pruned.view(-1)[order[weight_NK.numel() - num_zeros :]] = 0
    return pruned


def two_of_four(weight_NK: Tensor) -> Tensor:
    """Return a matrix in which two of four neighbouring columns are zero in each row, those of the smaller magnitudes.

    This is the pattern that the sparse tensor cores of GPUs multiply (Mishra et al., 2021). Columns beyond a multiple of four stay.
    """
    num_rows, num_columns = weight_NK.shape
    whole = num_columns // 4 * 4
    groups = weight_NK[:, :whole].reshape(num_rows, -1, 4)
    smaller = groups.abs().sort(dim=-1, descending=True, stable=True).indices[..., 2:]
    pruned = groups.scatter(-1, smaller, 0.0).reshape(num_rows, whole)
    return torch.cat((pruned, weight_NK[:, whole:]), dim=1)
