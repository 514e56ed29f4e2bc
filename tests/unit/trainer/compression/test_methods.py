"""Pruning removes the smallest weights, exactly as many as asked for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.compression.methods import magnitude_pruned, two_of_four

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 17))
SEEDS = st.integers(0, 99)


@given(SHAPES, SEEDS, st.floats(0.01, 0.99))
def test_the_smallest_magnitudes_become_zero_and_the_others_stay(shape: tuple[int, int], seed: int, share: float) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pruned = magnitude_pruned(weight_NK, share)
    gone = pruned == 0
    assert int(gone.sum()) == round(share * weight_NK.numel())
    assert torch.equal(pruned[~gone], weight_NK[~gone])
    if gone.any() and not gone.all():
        assert weight_NK[gone].abs().max() <= weight_NK[~gone].abs().min()


def test_equal_magnitudes_are_removed_from_the_end() -> None:
    assert magnitude_pruned(torch.ones(1, 4), 0.5).tolist() == [[1.0, 1.0, 0.0, 0.0]]


@given(SHAPES, SEEDS)
def test_two_of_four_neighbours_stay_and_they_are_the_larger_ones(shape: tuple[int, int], seed: int) -> None:
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pruned = two_of_four(weight_NK)
    whole = shape[1] // 4 * 4
    assert torch.equal(pruned[:, whole:], weight_NK[:, whole:])
    groups, kept = weight_NK[:, :whole].reshape(-1, 4), pruned[:, :whole].reshape(-1, 4)
    assert torch.equal((kept != 0).sum(-1), torch.full((len(groups),), 2))
    assert torch.equal(kept.abs().sum(-1), groups.abs().sort(-1, descending=True).values[:, :2].sum(-1))
