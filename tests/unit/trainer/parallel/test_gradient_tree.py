"""Tests of the tree with ranks that run in turn in one process. The test passes on what they exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.parallel.gradient_tree import GradientTree, add_pairwise


@dataclass
class Rank:
    """The methods of a group that the tree needs. The test sets `exchanged` and `gathered` once all ranks have sent their parts."""

    rank: int
    world_size: int
    sent: Tensor | None = None
    exchanged: Tensor | None = None
    share: Tensor | None = None
    gathered: Tensor | None = None

    def exchange(self, values_P: Tensor, out: Tensor) -> Tensor:
        self.sent = values_P.clone()
        if self.exchanged is None:
            raise WaitingError
        return out.copy_(self.exchanged)

    def gather(self, share_C: Tensor, out: Tensor) -> Tensor:
        self.share = share_C.clone()
        if self.gathered is None:
            raise WaitingError
        return out.copy_(self.gathered)


class WaitingError(Exception):
    """The other ranks have not sent their parts yet."""


def parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def sum_on_ranks(leaves: Sequence[Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], world_size: int) -> list[list[Tensor]]:
    """Return the gradients on each rank after `world_size` ranks have added the leaves, each a list of gradients."""
    per_rank = len(leaves) // world_size
    ranks = [Rank(number, world_size) for number in range(world_size)]
    trees, weights = [], []
    for rank in ranks:
        own = parameters(shapes)
        tree = GradientTree(own, rank)  # type: ignore[arg-type]
        tree.begin()
        for leaf in leaves[rank.rank * per_rank : (rank.rank + 1) * per_rank]:
            for parameter, gradient in zip(own, leaf, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
            tree.add()
        trees.append(tree)
        weights.append(own)

    def finish_all() -> None:
        for tree in trees:
            try:
                tree.finish()
            except WaitingError:
                continue

    finish_all()
    if world_size > 1:
        chunks = [rank.sent.chunk(world_size) for rank in ranks if rank.sent is not None]
        for rank in ranks:
            rank.exchanged = torch.cat([sent[rank.rank] for sent in chunks])
        finish_all()
        shares = torch.cat([rank.share for rank in ranks if rank.share is not None])
        for rank in ranks:
            rank.gathered = shares
        finish_all()
    return [[parameter.grad for parameter in own if parameter.grad is not None] for own in weights]


def random_leaves(shapes: Sequence[tuple[int, ...]], count: int, seed: int) -> list[list[Tensor]]:
    """Return gradients of very different sizes, so that another order of addition changes bits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(shape, generator=generator) * 10 ** float(torch.randint(-3, 4, (), generator=generator)) for shape in shapes]
        for _ in range(count)
    ]


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """Return the sum by definition: add both halves, then add their sums."""
    half = len(leaves) // 2
    return leaves[0].clone() if not half else tree_sum(leaves[:half]) + tree_sum(leaves[half:])


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 1000))
def test_the_sum_has_the_same_bits_on_any_number_of_ranks(log_leaves: int, log_ranks: int, seed: int) -> None:
    shapes = [(3, 5), (7,), (2, 2)]
    leaves = random_leaves(shapes, 2**log_leaves, seed)
    expected = [tree_sum([leaf[number] for leaf in leaves]) for number in range(len(shapes))]
    for gradients in sum_on_ranks(leaves, shapes, 2 ** min(log_ranks, log_leaves)):
        assert all(torch.equal(got, wanted) for got, wanted in zip(gradients, expected, strict=True))


def test_adding_in_the_order_of_arrival_would_give_other_bits() -> None:
    leaves = random_leaves([(1000,)], 8, seed=0)
    in_order = torch.stack([leaf[0] for leaf in leaves]).cumsum(0)[-1]
    assert not torch.equal(in_order, tree_sum([leaf[0] for leaf in leaves]))


def test_a_second_batch_starts_from_zero_and_takes_no_more_memory() -> None:
    [weight] = parameters([(4,)])
    tree = GradientTree([weight], Rank(0, 1))  # type: ignore[arg-type]
    seen = set()
    for _ in range(3):
        tree.begin()
        for _ in range(4):
            assert weight.grad is not None
            weight.grad += 1
            tree.add()
            seen.add(weight.grad.data_ptr())
        tree.finish()
        assert weight.grad is not None
        assert weight.grad.tolist() == [4.0] * 4
    assert len(seen) <= 3  # the gradients of one micro-batch, and log2(4) sums


def test_a_step_that_was_broken_off_leaves_nothing_in_the_next() -> None:
    [weight] = parameters([(4,)])
    tree = GradientTree([weight], Rank(0, 1))  # type: ignore[arg-type]
    tree.begin()
    assert weight.grad is not None
    weight.grad += 5
    tree.add()
    tree.begin()
    weight.grad += 1
    tree.add()
    tree.finish()
    assert weight.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_memory_that_runs_out_for_a_partial_sum_leaves_the_tree_as_it_was(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four leaves need three buffers. The allocation of each fails once and is repeated."""
    [weight] = parameters([(4,)])
    tree = GradientTree([weight], Rank(0, 1))  # type: ignore[arg-type]
    zeros, made = torch.zeros, []

    def allocating(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(1)
        if len(made) == failing:
            raise MemoryError
        return zeros(*args, **kwargs)

    def again(action: Callable[[], None]) -> None:
        try:
            action()
        except MemoryError:
            action()

    monkeypatch.setattr(torch, "zeros", allocating)
    again(tree.begin)
    for number in range(4):
        assert weight.grad is not None
        weight.grad += number
        again(tree.add)
    tree.finish()
    assert len(made) == 4
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 4


@pytest.mark.parametrize("leaves", [3, 5, 6])
def test_leaves_that_make_no_whole_tree_are_refused(leaves: int) -> None:
    [weight] = parameters([(4,)])
    tree = GradientTree([weight], Rank(0, 1))  # type: ignore[arg-type]
    tree.begin()
    for _ in range(leaves):
        tree.add()
    with pytest.raises(ValueError, match="not a power of two"):
        tree.finish()


def test_ranks_that_make_no_whole_tree_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks are not a power of two"):
        GradientTree(parameters([(4,)]), Rank(0, 3))  # type: ignore[arg-type]


def test_pairs_are_neighbours() -> None:
    big, one = torch.tensor([1e8]), torch.tensor([1.0])
    assert add_pairwise([one.clone(), one.clone(), big.clone(), -big]).item() == 2.0
    assert add_pairwise([one.clone(), big.clone(), one.clone(), -big]).item() == 0.0
