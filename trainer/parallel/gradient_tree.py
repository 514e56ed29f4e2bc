r"""Adds the gradients of a global batch in a fixed order that does not depend on the number of ranks.

Floating-point addition is not associative, so a sum has the same bits on 1, 2, 4 and 8 ranks only if the same numbers are added
in the same pairs. The pairs here form a binary tree over the micro-batches of the global batch in their order:

    m0   m1   m2   m3   m4   m5   m6   m7        gradients of micro-batches
     \ /      \ /      \ /      \ /
      +        +        +        +
        \    /            \    /
          +                  +
             \            /
                   +

A rank has 2^j neighbouring leaves, which form a subtree, and adds them like a binary counter: a new leaf is added to the sum on its
left as long as both have the same height. So at most log2(leaves) + 1 sums exist at any time. The roots of the subtrees of the
ranks are the leaves of the remaining tree: each rank receives its share of the elements of all roots, adds them in the same tree,
and sends the result to all ranks. This transfers as many bytes as a ring all-reduce.

P elements of all gradients, padded to a multiple of W   W ranks   C elements in the share of a rank, P / W
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.distributed.group import Group
from trainer.parallel.accumulation import Accumulation


def add_pairwise(parts: Sequence[Tensor]) -> Tensor:
    """Add in the order of the tree, into the tensors. Their number must be a power of two."""
    assert len(parts) & (len(parts) - 1) == 0
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@dataclass(frozen=True)
class _Buffer:
    flat_P: Tensor
    views: tuple[Tensor, ...]


class GradientTree(Accumulation):
    """Sums the gradients that backward passes leave in `parameters` over the micro-batches of this rank, then over the ranks.

    Backward passes add to `parameter.grad`, which this class provides. Do not replace it between `begin` and `finish`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        if group.world_size & (group.world_size - 1):
            raise ValueError(f"{group.world_size} ranks are not a power of two")
        if len({(parameter.dtype, parameter.device) for parameter in parameters}) != 1:
            raise ValueError("the parameters have several types or devices")
        super().__init__(parameters)
        self._group = group
        num_elements = sum(parameter.numel() for parameter in parameters)
        self._padded = -(-num_elements // group.world_size) * group.world_size
        self._free: list[_Buffer] = []
        self._partial: list[tuple[int, _Buffer]] = []
        """Heights and sums of the finished subtrees, from left to right, with falling heights."""
        self._current: _Buffer | None = None
        self._num_leaves = 0
        self._finished = False

    def begin(self) -> None:
        self._num_leaves, self._finished = 0, False
        self._free += [buffer for _, buffer in self._partial]
        self._partial = []
        if self._current is None:
            self._current = self._take()
        self._attach(self._current)

    def add(self) -> None:
        """Add the gradients of one micro-batch, and set them to zero. If memory does not suffice for that, nothing has changed."""
        assert self._current is not None
        merges = bool(self._partial) and self._partial[-1][0] == 0
        following = None if merges else self._take()
        height, buffer = 0, self._current
        while self._partial and self._partial[-1][0] == height:
            _, left = self._partial.pop()
            left.flat_P.add_(buffer.flat_P)
            self._free.append(buffer)
            height, buffer = height + 1, left
        self._partial.append((height, buffer))
        self._current = following or self._take()  # after an addition of two buffers, one is free
        self._attach(self._current)
        self._num_leaves += 1

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        del last
        yield
        self.add()

    def join(self, num_passes: int) -> None:
        while self._num_leaves < num_passes:
            self.add()
        if not self._finished:
            self.finish()

    def finish(self) -> None:
        if len(self._partial) != 1:
            raise ValueError("the number of micro-batches of a rank is not a power of two")
        [(_, root)] = self._partial
        assert self._current is not None
        if self._group.world_size > 1:
            received_P = self._group.exchange(root.flat_P, out=self._current.flat_P)
            share_C = add_pairwise(received_P.chunk(self._group.world_size))
            self._group.gather(share_C, out=root.flat_P)
        for parameter, view in zip(self._parameters, root.views, strict=True):
            parameter.grad = view
        self._finished = True

    def _attach(self, buffer: _Buffer) -> None:
        buffer.flat_P.zero_()
        for parameter, view in zip(self._parameters, buffer.views, strict=True):
            parameter.grad = view

    def _take(self) -> _Buffer:
        if self._free:
            return self._free.pop()
        first = self._parameters[0]
        flat_P = torch.zeros(self._padded, dtype=first.dtype, device=first.device)
        sizes = [parameter.numel() for parameter in self._parameters]
        pieces = torch.split(flat_P[: sum(sizes)], sizes)
        return _Buffer(flat_P, tuple(piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)))
