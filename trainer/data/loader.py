"""Turns positions of the order into batches of tensors, before the step that needs them."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

from common.errors import ProjectError, StorageError
from common.storage_errors import explain_os_error
from data_pipeline.dataset.shards import Rows, ShardError
from trainer.config import BatchConfig, LoaderConfig
from trainer.data.batch import DataFault, GlobalBatch, blank_micro_batch, micro_batch, share_of_rank
from trainer.data.order import RowOrder
from trainer.distributed.group import Group
from trainer.runs.adjustments import Adjustments

_log = logging.getLogger(__name__)
_ValueT = TypeVar("_ValueT")
_DEFAULTS = LoaderConfig()
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
    """Return a rank's part of the global batch that begins at `position`. Tokens of other ranks' rows are not read."""
    indices = order.rows_at(position, config.global_batch_size)
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
    loader: LoaderConfig = _DEFAULTS,
    with_weights: bool = False,
    with_bounds: bool = False,
    left_out: Sequence[tuple[int, int]] = (),
    first_step: int = 1,
    adjustments: Adjustments = _UNADJUSTED,
    shard_of: Callable[[BaseException | None], str | None] = lambda _: None,
) -> Iterator[Iterator[GlobalBatch]]:
    """Yield an endless iterator over the global batches from position `start` on, which threads read up to `depth` batches ahead.

    A batch that would overlap a range of `left_out` (first and end) begins at its end. The iterator raises an error of a thread in
    place of the batch that failed. If `shard_of` knows the shard of the error, the batch is padding with a `fault` instead.
    """
    ahead: deque[Future[GlobalBatch]] = deque()
    failed_step, closed = math.inf, threading.Event()
    wanted = {"with_weights": with_weights, "with_bounds": with_bounds}

    def read(position: int, step: int) -> GlobalBatch:
        cut, blank = adjustments.batch(config, step), adjustments.quarantined(step)
        try:
            reading = partial(global_batch, rows.without(blank) if blank else rows, order, cut, group, position, **wanted)
            return _retried(reading, loader.retry_waits_s, closed)
        except ProjectError as error:
            shard = shard_of(error.__cause__ or error)
            if shard is None:
                raise
            padding = blank_micro_batch(cut.micro_rows, rows.row_length, **wanted)
            num_own, indices = len(share_of_rank(cut.micro_batches, group)), order.rows_at(position, cut.global_batch_size)
            return GlobalBatch(position, indices, 0, 1.0, (padding,) * num_own, cut.micro_batches, DataFault(shard, error))

    def read_unless_ended(position: int, step: int) -> GlobalBatch:
        nonlocal failed_step
        if closed.is_set() or step > failed_step:  # a reader may be late, so an earlier batch is still read after a failure
            raise RuntimeError("a batch before this one failed, or the loader was closed")  # nobody takes this batch
        try:
            return read(position, step)
        except BaseException:
            failed_step = min(failed_step, step)
            raise

    def in_order() -> Iterator[Future[GlobalBatch]]:
        position, step = start, first_step
        while True:
            position = _next_position(position, config.global_batch_size, left_out)
            yield pool.submit(read_unless_ended, position, step)
            position, step = position + config.global_batch_size, step + 1

    def consume() -> Iterator[GlobalBatch]:
        while True:
            batch = ahead.popleft().result()
            ahead.append(next(reads))
            yield batch

    pool = ThreadPoolExecutor(min(loader.readers, depth), thread_name_prefix="loader")
    reads = in_order()
    try:
        ahead.extend(islice(reads, depth))
        yield consume()
    finally:
        closed.set()
        pool.shutdown(cancel_futures=True)


def _next_position(position: int, num_rows: int, left_out: Sequence[tuple[int, int]]) -> int:
    """Return the first position at or after `position` where a batch of `num_rows` overlaps no range of `left_out`."""
    for first, end in sorted(left_out):
        if first < position + num_rows and position < end:
            position = end
    return position


def _retried(read: Callable[[], _ValueT], waits_s: Sequence[float], closed: threading.Event) -> _ValueT:
    # An `OSError` may be temporary. A damaged shard is read once more, because somebody may have been restoring it.
    left_s = iter(waits_s)
    damaged_before = False
    while True:
        try:
            return read()
        except OSError as error:
            wait_s = next(left_s, None)
            if wait_s is None:
                attempts = "1 attempt" if not waits_s else f"{len(waits_s) + 1} attempts"
                raise StorageError(f"{explain_os_error(error)} ({attempts} to read it failed)") from error
            _log.warning("%s; reading it again in %s s", error, wait_s)
            if closed.wait(wait_s):
                raise
        except ShardError as error:
            if damaged_before or not waits_s or closed.wait(waits_s[0]):
                raise
            damaged_before = True
            _log.warning("the first attempt to read a shard failed, trying once more: %s", error)
