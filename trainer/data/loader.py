"""Turns positions of the order into batches of tensors, before the step that needs them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from common.errors import ProjectError, StorageError
from common.storage_errors import explain_os_error
from data_pipeline.dataset.shards import Rows, ShardError
from trainer.config import BatchConfig
from trainer.data.adjustments import Adjustments
from trainer.data.batch import DataFault, GlobalBatch, blank_micro_batch, micro_batch, share_of_rank
from trainer.data.order import RowOrder
from trainer.distributed.group import Group

__all__ = ["RETRY_WAITS_S", "global_batch", "prefetched_batches"]

_log = logging.getLogger(__name__)
_ValueT = TypeVar("_ValueT")
RETRY_WAITS_S = (0.2, 1.0, 5.0)
"""Seconds to wait before the second, third and fourth attempt to read."""
_UNADJUSTED = Adjustments()


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
    """Return a rank's part of the global batch that begins at `position`. Tokens of other ranks' rows are not read.

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
    adjustments: Adjustments = _UNADJUSTED,
    shard_of: Callable[[BaseException | None], str | None] = lambda _: None,
) -> Iterator[Iterator[GlobalBatch]]:
    """Yield an endless iterator over the global batches from position `start` on. A thread reads up to `depth` batches ahead.

    The iterator raises an error of the thread in place of the batch that failed. One thread is enough, because reading only copies
    from mapped files: one second of CPU time read 17 to 25 million tokens (rows of 1,024 in the page cache, 2026-11-21).

    Args:
        rows: the rows.
        config: rows of a global batch, and of a micro-batch before any of the `adjustments`.
        group: the ranks; the batches hold this rank's part.
        order: the row at each position.
        start: position of the first row.
        depth: most global batches that are ready or being read.
        with_weights: see `MicroBatch.weights` and `GlobalBatch.normaliser`.
        with_bounds: see `MicroBatch.bounds`.
        left_out: ranges of positions to skip, as first and end. A batch that would overlap a range begins at its end.
        first_step: step of the first batch.
        adjustments: smaller micro-batches and shards in quarantine, by step.
        shard_of: returns the shard that a reading error is about, or None. If it returns a shard, the error is not raised, but the
            batch is padding and has a `fault`.

    Raises:
        PreparedDataError: from the iterator; a shard is damaged or missing.
        StorageError: from the iterator; a shard could not be read in four attempts.
    """
    ready: queue.SimpleQueue[GlobalBatch | BaseException] = queue.SimpleQueue()
    free = threading.Semaphore(depth)
    closed = threading.Event()
    wanted = {"with_weights": with_weights, "with_bounds": with_bounds}

    def read(position: int, step: int) -> GlobalBatch:
        cut, blank = adjustments.batch(config, step), adjustments.quarantined(step)
        try:
            reading = partial(global_batch, rows.without(blank) if blank else rows, order, cut, group, position, **wanted)
            return _retried(reading, closed)
        except ProjectError as error:
            shard = shard_of(error.__cause__ or error)
            if shard is None:
                raise
            padding = blank_micro_batch(cut.micro_rows, rows.row_length, **wanted)
            num_own, indices = len(share_of_rank(cut.micro_batches, group)), order.rows_at(position, cut.global_rows)
            return GlobalBatch(position, indices, 0, 1.0, (padding,) * num_own, cut.micro_batches, DataFault(shard, error))

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
    """Return the first position at or after `position` where a batch of `num_rows` overlaps no range of `left_out`."""
    for first, end in sorted(left_out):
        if first < position + num_rows and position < end:
            position = end
    return position


def _retried(read: Callable[[], _ValueT], closed: threading.Event) -> _ValueT:
    """Return the result of `read`, which is retried if it fails, until `closed` is set.

    An `OSError` may be temporary, so there are four attempts. A damaged shard is read once more, because somebody may have been
    restoring it.

    Raises:
        StorageError: every attempt raised an `OSError`; the message names the file.
        ShardError: the shard was damaged in both attempts.
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
            _log.warning("the first attempt to read a shard failed, trying once more: %s", error)
