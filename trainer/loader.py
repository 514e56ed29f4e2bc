"""Turns positions of the order into batches of tensors, ahead of the step that needs them.

B rows of a micro-batch   L tokens of a row
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.shards import RowBatch, Rows
from trainer.config import BatchConfig
from trainer.distributed import Group
from trainer.loss import IGNORE
from trainer.order import rows_at

__all__ = ["GlobalBatch", "MicroBatch", "micro_batch", "prefetched_batches", "share_of_rank"]


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass; all tensors have shape (B, L) and lie on one device."""

    tokens: Tensor
    """int64 ids."""
    segments: Tensor
    """int32 number of the document within the row, -1 on padding."""
    positions: Tensor
    """int64 place of the token in its document."""
    targets: Tensor
    """int64 id of the next token of the same document, IGNORE where there is none."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`; the copy from pinned memory does not wait."""
        tensors = (self.tokens, self.segments, self.positions, self.targets)
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's part of a global batch, with what all ranks must know of the whole."""

    start: int
    """Position of its first row in the order: the rows consumed before it."""
    rows: NDArray[np.int64]
    """All rows of the global batch, in order."""
    num_targets: int
    """Targets in the whole global batch; the sum of losses is divided by it."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's micro-batches, in order."""


def share_of_rank(micro_batches: int, group: Group) -> range:
    """The consecutive micro-batches of a global batch that a rank computes; shares differ by one at most."""
    return range(group.rank * micro_batches // group.world_size, (group.rank + 1) * micro_batches // group.world_size)


def micro_batch(rows: RowBatch) -> MicroBatch:
    """Positions and targets of packed rows."""
    segments_BL = rows.segments_BL
    tokens_BL = rows.tokens_BL.astype(np.int64)
    length = segments_BL.shape[1]
    starts_BL = np.ones_like(segments_BL, dtype=bool)
    starts_BL[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
    index_BL = np.broadcast_to(np.arange(length), segments_BL.shape)
    positions_BL = index_BL - np.maximum.accumulate(np.where(starts_BL, index_BL, 0), axis=1)
    targets_BL = np.full_like(tokens_BL, IGNORE)
    has_next_BL = ~starts_BL[:, 1:] & (segments_BL[:, 1:] >= 0)
    targets_BL[:, :-1][has_next_BL] = tokens_BL[:, 1:][has_next_BL]
    return MicroBatch(*(torch.from_numpy(array) for array in (tokens_BL, segments_BL, positions_BL, targets_BL)))


@contextmanager
def prefetched_batches(
    rows: Rows, config: BatchConfig, group: Group, seed: int, start: int, depth: int
) -> Iterator[Iterator[GlobalBatch]]:
    """The global batches from position `start` on, without end, prepared by a thread that stays `depth` batches ahead.

    An error of the thread is raised where its batch would have been.
    """
    ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: GlobalBatch | BaseException) -> None:
        delivered = False
        while not (delivered or closed.is_set()):
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                delivered = True

    def work() -> None:
        position = start
        try:
            while not closed.is_set():
                put(_read(rows, config, group, seed, position))
                position += config.global_rows
        except BaseException as error:
            put(error)

    def consume() -> Iterator[GlobalBatch]:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        closed.set()
        thread.join()


def _read(rows: Rows, config: BatchConfig, group: Group, seed: int, position: int) -> GlobalBatch:
    indices = rows_at(seed, position, config.global_rows, len(rows))
    micro_batches = []
    for number in share_of_rank(config.micro_batches, group):
        batch = micro_batch(rows.read(indices[number * config.micro : (number + 1) * config.micro]))
        micro_batches.append(_pinned(batch) if group.device.type == "cuda" else batch)
    return GlobalBatch(position, indices, int(rows.num_targets(indices).sum()), tuple(micro_batches))


def _pinned(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(
        batch.tokens.pin_memory(), batch.segments.pin_memory(), batch.positions.pin_memory(), batch.targets.pin_memory()
    )
