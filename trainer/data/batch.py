"""Rows as tensors: micro-batches and global batches.

B rows of a micro-batch   L tokens of a row   P pieces of a micro-batch   M room for pieces

A piece is the part of a document in one row; the padding at the end of a row is a piece too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ProjectError
from data_pipeline.dataset.shards import RowBatch
from trainer.distributed.group import Group

IGNORE = -100
"""The target of a position without a loss: the last token of a piece, padding, and positions before a token that the loss mask of
the data leaves out. It is a constant and not a setting, because the loss mask of the data selects the tokens with a loss."""
MICRO_BATCH_BYTES = 28  # bytes of ids, segments, positions and targets of one token
_PIECES = 64


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass. All tensors are on one device and have shape (B, L), except `bounds`."""

    tokens: Tensor  # int64 ids
    segments: Tensor  # int32 number of the document within the row, -1 on padding
    positions: Tensor  # int64 position of the token in its piece
    targets: Tensor
    """int64 id of the next token of the same piece, IGNORE if there is none or the loss mask leaves it out; or the targets of the
    rows themselves (`RowBatch.targets_BL`)."""
    weights: Tensor | None = None
    """fp32 1 / (targets in the piece), 0 without a target, so all pieces with a target weigh the same. None: not needed."""
    bounds: Tensor | None = None
    """int32 (M + 1,): first position of every piece in the flattened micro-batch, then B * L up to the end. M is
    `num_bounds(P) - 1`. None: not needed."""

    def to(self, device: torch.device) -> MicroBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        return self._each(Tensor.pin_memory)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        num_rows, length = self.tokens.shape
        middle = num_rows // 2
        return self._rows(0, middle, length), self._rows(middle, num_rows, length)

    def _rows(self, first: int, end: int, length: int) -> MicroBatch:
        part = replace(self, bounds=None)._each(lambda tensor: tensor[first:end])
        if self.bounds is None:
            return part
        firsts_P = self.bounds[(self.bounds >= first * length) & (self.bounds < end * length)] - first * length
        return replace(part, bounds=_bounds(firsts_P, end - first, length))

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        return replace(self, **{name: change(tensor) for name, tensor in vars(self).items() if tensor is not None})


@dataclass(frozen=True)
class DataFault:
    shard: str  # path of the shard in the manifest
    error: ProjectError


@dataclass(frozen=True)
class GlobalBatch:
    start: int  # position of the first row in the order, which is the number of rows consumed before this batch
    rows: NDArray[np.int64]  # all rows of the global batch, in order
    num_targets: int  # targets in the whole global batch
    normaliser: float
    """Divisor of the summed loss of the whole global batch: its number of targets, or with weights its number of pieces that have a
    target; at least 1."""
    micro_batches: tuple[MicroBatch, ...]  # this rank's micro-batches, in order
    num_micro_batches: int  # number of micro-batches of all ranks
    fault: DataFault | None = None
    """The shard that could not be read. All rows of this rank's micro-batches are then padding, and `num_targets` and `normaliser`
    are not valid. None if all rows were read."""

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @property
    def shapes(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of all tensors. A compiled model may be compiled again if one of them is new."""
        return frozenset(
            (name, tuple(tensor.shape))
            for micro in self.micro_batches
            for name, tensor in vars(micro).items()
            if tensor is not None
        )


def share_of_rank(micro_batches: int, group: Group) -> range:
    """Return the consecutive micro-batches of a global batch that a rank computes. The counts of ranks differ by at most one."""
    return range(group.rank * micro_batches // group.world_size, (group.rank + 1) * micro_batches // group.world_size)


def num_bounds(num_pieces: int) -> int:
    """Return the length of `bounds`: one more than the next multiple of 64 of at least `num_pieces`, so that there are few shapes.

    Each empty piece costs flash attention thread blocks for all heads, so a power of two would be too many.
    """
    return -(-num_pieces // _PIECES) * _PIECES + 1


def micro_batch(rows: RowBatch, *, with_weights: bool = False, with_bounds: bool = False) -> MicroBatch:
    segments_BL = rows.segments_BL
    num_rows, length = segments_BL.shape
    tokens_BL = rows.tokens_BL.astype(np.int64)
    is_first_BL = np.ones(segments_BL.shape, dtype=bool)
    np.not_equal(segments_BL[:, 1:], segments_BL[:, :-1], out=is_first_BL[:, 1:])
    firsts_P = np.flatnonzero(is_first_BL)
    lengths_P = np.diff(firsts_P, append=num_rows * length)
    positions_BL = (np.arange(num_rows * length) - np.repeat(firsts_P, lengths_P)).reshape(num_rows, length)
    has_target_BL = segments_BL >= 0
    has_target_BL.reshape(-1)[firsts_P + lengths_P - 1] = False
    if rows.has_loss_BL is not None:  # of the next token; the last token of a row has no target
        has_target_BL[:, :-1] &= rows.has_loss_BL[:, 1:]
    targets_BL = np.where(has_target_BL, np.roll(tokens_BL, -1), IGNORE)
    if rows.targets_BL is not None:
        targets_BL, has_target_BL = rows.targets_BL, rows.targets_BL != IGNORE
    weights_BL = bounds = None
    if with_weights:
        targets_P = np.add.reduceat(has_target_BL.reshape(-1), firsts_P, dtype=np.int64)
        weights_P = (1 / np.maximum(targets_P, 1)).astype(np.float32)
        weights_BL = torch.from_numpy(np.repeat(weights_P, lengths_P).reshape(num_rows, length) * has_target_BL)
    if with_bounds:
        bounds = _bounds(torch.from_numpy(firsts_P), num_rows, length)
    return MicroBatch(
        torch.from_numpy(tokens_BL),
        torch.from_numpy(segments_BL),
        torch.from_numpy(positions_BL),
        torch.from_numpy(targets_BL),
        weights_BL,
        bounds,
    )


def blank_micro_batch(num_rows: int, row_length: int, *, with_weights: bool = False, with_bounds: bool = False) -> MicroBatch:
    nothing = np.zeros((num_rows, row_length), np.uint16)
    rows = RowBatch(nothing, np.full(nothing.shape, -1, np.int32))
    return micro_batch(rows, with_weights=with_weights, with_bounds=with_bounds)


def _bounds(firsts_P: Tensor, num_rows: int, length: int) -> Tensor:
    bounds = torch.full((num_bounds(len(firsts_P)),), num_rows * length, dtype=torch.int32)
    bounds[: len(firsts_P)] = firsts_P
    return bounds
