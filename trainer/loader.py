"""Turns positions of the order into batches of tensors, ahead of the step that needs them.

A piece is what packing left of a document in one row; the padding at the end of a row is a piece of its own.

    B rows of a micro-batch   L tokens of a row   P pieces of a micro-batch   M room for pieces
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ProjectError, StorageError
from common.storage_errors import explain_os_error
from data_pipeline.dataset.shards import RowBatch, Rows, ShardError
from trainer.changes import Changes
from trainer.config import BatchConfig
from trainer.distributed.group import Group
from trainer.loss import IGNORE
from trainer.order import RowOrder

__all__ = [
    "RETRY_WAITS_S",
    "DataFault",
    "GlobalBatch",
    "MicroBatch",
    "blank_micro_batch",
    "global_batch",
    "micro_batch",
    "num_bounds",
    "prefetched_batches",
    "share_of_rank",
]

_log = logging.getLogger(__name__)
_ValueT = TypeVar("_ValueT")

RETRY_WAITS_S = (0.2, 1.0, 5.0)
"""Waits before the second, third and fourth attempt to read, in seconds."""
_MIN_PIECES_PER_ROW = 16
_UNCHANGED = Changes()


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass; all tensors lie on one device, and have shape (B, L) where nothing else is said."""

    tokens: Tensor
    """int64 ids."""
    segments: Tensor
    """int32 number of the document within the row, -1 on padding."""
    positions: Tensor
    """int64 place of the token in its piece."""
    targets: Tensor
    """int64 id of the next token of the same document, IGNORE where there is none."""
    weights: Tensor | None = None
    """fp32 1 / (targets in the piece), 0 where there is no target; so every piece weighs one. None: not asked for."""
    bounds: Tensor | None = None
    """int32 (M + 1,): first position of every piece in the flattened micro-batch, then B * L up to the end. M is
    `num_bounds(P, B) - 1`. None: not asked for."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`; the copy from pinned memory does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """The same batch in memory from which a GPU copies by itself."""
        return self._each(Tensor.pin_memory)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """The upper and the lower rows, of two or more."""
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
    """A shard that this rank could not read, after all attempts."""

    shard: str
    """Its path as in the manifest."""
    error: ProjectError


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's part of a global batch, with what all ranks must know of the whole."""

    start: int
    """Position of its first row in the order: the rows consumed before it."""
    rows: NDArray[np.int64]
    """All rows of the global batch, in order."""
    num_targets: int
    """Targets in the whole global batch."""
    normaliser: float
    """What the summed loss of the whole global batch is divided by: its targets, or with weights its pieces that have a
    target; 1 where there are none."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's micro-batches, in order."""
    num_micro_batches: int
    """Those of all ranks."""
    fault: DataFault | None = None
    """Why all rows of this rank's micro-batches are padding, and its numbers worthless; None: they are as they should be."""


def share_of_rank(micro_batches: int, group: Group) -> range:
    """The consecutive micro-batches of a global batch that a rank computes; shares differ by one at most."""
    return range(group.rank * micro_batches // group.world_size, (group.rank + 1) * micro_batches // group.world_size)


def num_bounds(num_pieces: int, num_rows: int) -> int:
    """Length of `bounds` for a micro-batch of `num_rows` rows: one more than a power of two that is at least `num_pieces`.

    It starts at 16 pieces a row, so that batches of ordinary documents all have one shape, and a compiled model or a CUDA graph
    is made once. Empty pieces cost next to nothing.
    """
    return (1 << (max(num_pieces, _MIN_PIECES_PER_ROW * num_rows) - 1).bit_length()) + 1


def micro_batch(rows: RowBatch, *, with_weights: bool = False, with_bounds: bool = False) -> MicroBatch:
    """Positions and targets of packed rows, and what else is asked for."""
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
    targets_BL = np.where(has_target_BL, np.roll(tokens_BL, -1), IGNORE)
    weights_BL = bounds = None
    if with_weights:
        weights_P = (1 / np.maximum(lengths_P - 1, 1)).astype(np.float32)
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
    """A micro-batch of padding alone."""
    nothing = np.zeros((num_rows, row_length), np.uint16)
    rows = RowBatch(nothing, np.full(nothing.shape, -1, np.int32))
    return micro_batch(rows, with_weights=with_weights, with_bounds=with_bounds)


def _bounds(firsts_P: Tensor, num_rows: int, length: int) -> Tensor:
    """See `MicroBatch.bounds`."""
    bounds = torch.full((num_bounds(len(firsts_P), num_rows),), num_rows * length, dtype=torch.int32)
    bounds[: len(firsts_P)] = firsts_P
    return bounds


def global_batch(
    rows: Rows,
    order: RowOrder,
    config: BatchConfig,
    group: Group,
    position: int,
    *,
    with_weights: bool = False,
    with_bounds: bool = False,
) -> GlobalBatch:
    """A rank's part of the global batch that begins at `position`; of the other ranks' rows no token is read.

    Raises:
        PreparedDataError: a shard is damaged or missing.
        OSError: a shard could not be read.
    """
    indices = order.rows_at(position, config.global_rows)
    num_targets = int(rows.num_targets(indices).sum())
    normaliser = int(rows.num_sequences(indices).sum()) if with_weights else num_targets
    micro_batches = []
    for number in share_of_rank(config.micro_batches, group):
        chosen = indices[number * config.micro_rows : (number + 1) * config.micro_rows]
        micro = micro_batch(rows.read(chosen), with_weights=with_weights, with_bounds=with_bounds)
        micro_batches.append(micro.pinned() if group.device.type == "cuda" else micro)
    return GlobalBatch(
        position, indices, num_targets, float(max(1, normaliser)), tuple(micro_batches), num_micro_batches=config.micro_batches
    )


def _without_data(
    order: RowOrder, config: BatchConfig, group: Group, position: int, blank: MicroBatch, fault: DataFault
) -> GlobalBatch:
    """What stands in for a batch that could not be read: of the same shape, so that this rank can keep step with the others."""
    own = share_of_rank(config.micro_batches, group)
    indices = order.rows_at(position, config.global_rows)
    return GlobalBatch(position, indices, 0, 1.0, (blank,) * len(own), num_micro_batches=config.micro_batches, fault=fault)


@contextmanager
def prefetched_batches(
    rows: Rows,
    config: BatchConfig,
    group: Group,
    order: RowOrder,
    start: int,
    depth: int,
    *,
    with_weights: bool = False,
    with_bounds: bool = False,
    left_out: Sequence[tuple[int, int]] = (),
    first_step: int = 1,
    changes: Changes = _UNCHANGED,
    shard_of: Callable[[BaseException | None], str | None] = lambda _: None,
) -> Iterator[Iterator[GlobalBatch]]:
    """The global batches from position `start` on, without end, prepared by a thread that stays `depth` batches ahead.

    An error of the thread is raised where its batch would have been. One thread is enough: reading is copying from mapped
    files, and a second of processor time gave 17 to 25 million tokens (rows of 1,024 in the page cache, 2026-11-21).

    Args:
        rows: where the rows are read.
        config: how many of them make a batch, and a micro-batch of a run that has changed nothing.
        group: whose part to read.
        order: which row comes when.
        start: position of the first row.
        depth: global batches that are ready or being read, at most.
        with_weights: see `MicroBatch.weights` and `GlobalBatch.normaliser`.
        with_bounds: see `MicroBatch.bounds`.
        left_out: positions to pass over, as first and end; a batch that would touch one begins at its end.
        first_step: number of the step that the first batch is for.
        changes: of the micro-batches and the shards, by step.
        shard_of: which shard a reading error is about. Such an error is no longer raised: the batch comes as padding, with its
            `fault`.

    Raises:
        PreparedDataError: from the iterator; a shard is damaged or missing.
        StorageError: from the iterator; a shard could not be read in four attempts.
    """
    ready: queue.SimpleQueue[GlobalBatch | BaseException] = queue.SimpleQueue()
    free = threading.Semaphore(depth)
    closed = threading.Event()
    wanted = {"with_weights": with_weights, "with_bounds": with_bounds}

    def read(position: int, step: int) -> GlobalBatch:
        cut, blank = changes.batch(config, step), changes.quarantined(step)
        try:
            reading = partial(global_batch, rows.without(blank) if blank else rows, order, cut, group, position, **wanted)
            return _retried(reading, closed)
        except ProjectError as error:
            shard = shard_of(error.__cause__ or error)
            if shard is None:
                raise
            padding = blank_micro_batch(cut.micro_rows, rows.row_length, **wanted)
            return _without_data(order, cut, group, position, padding, DataFault(shard, error))

    def work() -> None:
        position, step = start, first_step
        try:
            while free.acquire() and not closed.is_set():
                position = _next_position(position, config.global_rows, left_out)
                ready.put(read(position, step))
                position, step = position + config.global_rows, step + 1
        except BaseException as error:
            ready.put(error)

    def consume() -> Iterator[GlobalBatch]:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            free.release()
            yield item

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        closed.set()
        free.release()
        thread.join()


def _next_position(position: int, num_rows: int, left_out: Sequence[tuple[int, int]]) -> int:
    """Where a batch of `num_rows` that would begin at `position` begins."""
    for first, end in sorted(left_out):
        if first < position + num_rows and position < end:
            position = end
    return position


def _retried(read: Callable[[], _ValueT], closed: threading.Event) -> _ValueT:
    """What `read` returns, after some more attempts where it fails, unless `closed` is set meanwhile.

    An `OSError` may pass, so there are four attempts; a damaged shard is read once more, as it may have been in the middle of
    being put back.

    Raises:
        StorageError: an `OSError` came each time; names the file.
        ShardError: the shard was damaged each time.
    """
    waits_s = iter(RETRY_WAITS_S)
    damaged_before = False
    while True:
        try:
            return read()
        except OSError as error:
            wait_s = next(waits_s, None)
            if wait_s is None:
                raise StorageError(f"{explain_os_error(error)} ({len(RETRY_WAITS_S) + 1} attempts to read it failed)") from error
            _log.warning("%s; reading it again in %s s", error, wait_s)
            if closed.wait(wait_s):
                raise
        except ShardError as error:
            if damaged_before or closed.wait(RETRY_WAITS_S[0]):
                raise
            damaged_before = True
            _log.warning("%s; it is read again", error)
