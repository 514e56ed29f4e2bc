import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.errors import PreparedDataError, StorageError
from data_pipeline.dataset.shards import RowBatch, Rows, ShardError
from trainer.config import BatchConfig, LoaderConfig
from trainer.data.batch import IGNORE, MicroBatch, micro_batch, num_bounds, share_of_rank
from trainer.data.loader import global_batch, prefetched_batches
from trainer.data.order import UniformOrder, rows_at
from trainer.distributed.group import Group
from trainer.runs.adjustments import Adjustment, Adjustments

LENGTH = 16
TWO_ROWS = BatchConfig(global_batch_size=2, micro_batch_size=2)
AT_ONCE = LoaderConfig(retry_waits_s=(0.0, 0.0, 0.0))

packed_rows = st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4)
"""Lengths of the documents of each row of 24 tokens; the rest is padding."""


class NumberedRows:
    """Rows that say which they are: every token of row i is i, in i % 3 + 1 documents, the last of them of one token."""

    def __init__(self, num_rows: int, before_read: Callable[[int], None] = lambda number: None) -> None:
        self.num_rows, self.reads, self.before_read = num_rows, 0, before_read

    def __len__(self) -> int:
        return self.num_rows

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        self.reads += 1
        self.before_read(self.reads)
        tokens = np.repeat(indices.astype(np.uint16)[:, None], LENGTH, axis=1)
        segments = np.zeros(tokens.shape, np.int32)
        segments[indices % 3 == 1, 8:] = 1
        segments[indices % 3 == 2, 8:] = 1
        segments[indices % 3 == 2, -1] = 2
        return RowBatch(tokens, segments)

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return LENGTH - 1 - indices % 3

    def num_sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(indices % 3 + 1, 2)


def numbered(num_rows: int, before_read: Callable[[int], None] = lambda number: None) -> tuple[NumberedRows, Rows]:
    """Such rows, as what they are and as what the loader takes them for."""
    rows = NumberedRows(num_rows, before_read)
    return rows, cast(Rows, rows)


def group(rank: int = 0, world_size: int = 1) -> Group:
    return Group(rank, world_size, rank, torch.device("cpu"))


def rows_in(micro_batches: tuple[MicroBatch, ...]) -> list[int]:
    return [int(row) for micro in micro_batches for row in micro.tokens[:, 0]]


def rows_of_rank(num_rows: int, config: BatchConfig, member: Group, start: int, count: int) -> list[list[int]]:
    _, rows = numbered(num_rows)
    with prefetched_batches(rows, config, member, UniformOrder(5, num_rows), start, depth=2) as batches:
        taken = [next(batches) for _ in range(count)]
    return [rows_in(batch.micro_batches) for batch in taken]


def packed(lengths: list[list[int]], seed: int = 0) -> RowBatch:
    tokens = np.random.default_rng(seed).integers(0, 100, (len(lengths), 24), dtype=np.uint16)
    segments = np.full((len(lengths), 24), -1, dtype=np.int32)
    for row, documents in enumerate(lengths):
        segments[row, : sum(documents)] = np.repeat(np.arange(len(documents)), documents)
    return RowBatch(tokens, segments)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@given(lengths=packed_rows, seed=st.integers(0, 99))
def test_a_target_is_the_next_token_of_the_same_document(lengths: list[list[int]], seed: int) -> None:
    rows = packed(lengths, seed)
    batch = micro_batch(rows)
    assert batch.tokens.tolist() == rows.tokens_BL.tolist()
    assert batch.segments.tolist() == rows.segments_BL.tolist()
    assert [tensor.dtype for tensor in (batch.tokens, batch.segments, batch.positions, batch.targets)] == [
        torch.int64,
        torch.int32,
        torch.int64,
        torch.int64,
    ]
    for row, documents in enumerate(lengths):
        expected_targets: list[int] = []
        expected_positions: list[int] = []
        start = 0
        for length in documents:
            expected_targets += [*rows.tokens_BL[row, start + 1 : start + length].tolist(), IGNORE]
            expected_positions += range(length)
            start += length
        assert batch.targets[row].tolist() == expected_targets + [IGNORE] * (24 - start)
        assert batch.positions[row].tolist() == [*expected_positions, *range(24 - start)]


@given(lengths=packed_rows, data=st.data())
def test_a_token_without_a_loss_is_no_target_and_each_piece_with_a_target_weighs_one(
    lengths: list[list[int]], data: st.DataObject
) -> None:
    rows = packed(lengths)
    mask = st.lists(st.booleans(), min_size=24, max_size=24)
    has_loss = np.array(data.draw(st.lists(mask, min_size=len(lengths), max_size=len(lengths))))
    batch, plain = micro_batch(replace(rows, has_loss_BL=has_loss), with_weights=True), micro_batch(rows)
    assert batch.weights is not None
    for row, documents in enumerate(lengths):
        for place in range(24):
            is_kept = place < 23 and has_loss[row, place + 1]
            assert batch.targets[row, place] == (plain.targets[row, place] if is_kept else IGNORE)
        for start, end in pairwise(np.cumsum([0, *documents]).tolist()):
            targets, weights = batch.targets[row, start:end], batch.weights[row, start:end]
            num_targets = int((targets != IGNORE).sum())
            assert weights[targets == IGNORE].tolist() == [0.0] * (end - start - num_targets)
            assert weights[targets != IGNORE].tolist() == pytest.approx([1 / max(1, num_targets)] * num_targets, rel=1e-7)


@given(lengths=packed_rows)
def test_each_piece_with_a_target_weighs_one(lengths: list[list[int]]) -> None:
    batch = micro_batch(packed(lengths), with_weights=True)
    assert batch.weights is not None
    assert batch.weights.dtype == torch.float32
    for row, documents in enumerate(lengths):
        expected = [[1 / (length - 1)] * (length - 1) + [0.0] if length > 1 else [0.0] for length in documents]
        flat = [weight for piece in expected for weight in piece]
        assert batch.weights[row].tolist() == pytest.approx(flat + [0.0] * (24 - len(flat)), rel=1e-7)


@given(lengths=packed_rows)
def test_bounds_are_where_pieces_begin_and_then_the_end(lengths: list[list[int]]) -> None:
    batch = micro_batch(packed(lengths), with_bounds=True)
    assert batch.bounds is not None
    assert batch.bounds.dtype == torch.int32
    pieces = [length for documents in lengths for length in [*documents, 24 - sum(documents)] if length]
    end = 24 * len(lengths)
    expected = [sum(pieces[:number]) for number in range(len(pieces))]
    assert len(batch.bounds) == num_bounds(len(pieces))
    assert batch.bounds.tolist() == expected + [end] * (len(batch.bounds) - len(pieces))


@given(num_pieces=st.integers(1, 1 << 20))
def test_bounds_have_room_for_all_pieces_and_few_lengths(num_pieces: int) -> None:
    room = num_bounds(num_pieces) - 1
    assert room % 64 == 0
    assert num_pieces <= room < num_pieces + 64


def test_nothing_is_made_that_was_not_asked_for() -> None:
    batch = micro_batch(packed([[3]]))
    assert batch.weights is None
    assert batch.bounds is None


def test_a_batch_moves_with_all_that_it_has() -> None:
    moved = micro_batch(packed([[3, 1], [5]]), with_bounds=True).to(torch.device("meta"))
    assert moved.weights is None
    assert moved.bounds is not None
    assert {tensor.device.type for tensor in (moved.tokens, moved.segments, moved.positions, moved.targets, moved.bounds)} == {
        "meta"
    }


@given(micro_batches=st.integers(1, 64), world_size=st.integers(1, 64))
def test_the_shares_of_the_ranks_are_consecutive_complete_and_even(micro_batches: int, world_size: int) -> None:
    shares = [share_of_rank(micro_batches, group(rank, world_size)) for rank in range(world_size)]
    assert [number for share in shares for number in share] == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    num_rows=st.integers(1, 40),
    micro=st.integers(1, 5),
    micro_batches=st.integers(1, 6),
    world_size=st.integers(1, 8),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
)
def test_all_ranks_together_read_each_row_once_in_every_epoch(
    num_rows: int, micro: int, micro_batches: int, world_size: int, epochs: int, seed: int
) -> None:
    config, (_, rows) = BatchConfig(global_batch_size=micro * micro_batches, micro_batch_size=micro), numbered(num_rows)
    together: list[int] = []
    for position in range(0, epochs * num_rows, config.global_batch_size):
        for rank in range(world_size):
            batch = global_batch(rows, UniformOrder(seed, num_rows), config, group(rank, world_size), position)
            together += rows_in(batch.micro_batches)
    for epoch in range(epochs):
        assert sorted(together[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_together_read_the_order_exactly(world_size: int) -> None:
    config = BatchConfig(global_batch_size=12, micro_batch_size=2)
    by_rank = [rows_of_rank(31, config, group(rank, world_size), start=24, count=5) for rank in range(world_size)]
    together = [[row for ranks in by_rank for row in ranks[number]] for number in range(5)]
    assert together == rows_at(5, 24, 60, 31).reshape(5, 12).tolist()


def test_a_fresh_loader_goes_on_at_every_position() -> None:
    config = BatchConfig(global_batch_size=4, micro_batch_size=2)
    whole = [row for batch in rows_of_rank(7, config, group(), start=0, count=8) for row in batch]
    for position in range(28):
        assert rows_of_rank(7, config, group(), start=position, count=1) == [whole[position : position + 4]]


@pytest.mark.parametrize("with_weights", [False, True])
def test_the_normaliser_is_that_of_the_whole_batch_on_every_rank(with_weights: bool) -> None:
    config, (_, rows) = BatchConfig(global_batch_size=12, micro_batch_size=2), numbered(31)
    batches = [global_batch(rows, UniformOrder(1, 31), config, group(rank, 3), 5, with_weights=with_weights) for rank in range(3)]
    micros = [micro for batch in batches for micro in batch.micro_batches]
    targets = sum(int((micro.targets != IGNORE).sum()) for micro in micros)
    pieces = sum(float(micro.weights.sum()) for micro in micros if micro.weights is not None)
    assert {batch.num_targets for batch in batches} == {targets}
    assert {batch.normaliser for batch in batches} == {round(pieces) if with_weights else targets}
    assert [micro.bounds for micro in micros] == [None] * len(micros)


def test_a_batch_without_a_target_is_divided_by_one() -> None:
    rows, as_rows = numbered(4)
    rows.num_targets = lambda indices: np.zeros(len(indices), np.int64)  # type: ignore[method-assign]
    assert (
        global_batch(as_rows, UniformOrder(1, 4), BatchConfig(global_batch_size=2, micro_batch_size=2), group(), 0).normaliser == 1
    )


def test_what_is_asked_for_is_in_every_prefetched_batch() -> None:
    _, rows = numbered(8)
    config, order = BatchConfig(global_batch_size=4, micro_batch_size=2), UniformOrder(0, 8)
    with prefetched_batches(rows, config, group(), order, 0, 2, with_weights=True, with_bounds=True) as batches:
        micros = [micro for _ in range(3) for micro in next(batches).micro_batches]
    assert all(micro.weights is not None and micro.bounds is not None for micro in micros)


def test_damaged_data_is_raised_at_its_batch_and_not_read_again() -> None:
    def fail_at_third(number: int) -> None:
        if number == 3:
            raise PreparedDataError("train/a-00000.arrow: damaged")

    rows, as_rows = numbered(8, fail_at_third)
    with prefetched_batches(
        as_rows, BatchConfig(global_batch_size=2, micro_batch_size=2), group(), UniformOrder(0, 8), 0, depth=4
    ) as batches:
        next(batches)
        next(batches)
        with pytest.raises(PreparedDataError, match="a-00000"):
            next(batches)
    assert rows.reads == 3
    assert not loader_threads()


def failing(numbers: range) -> Callable[[int], None]:
    """Fails the reads with these numbers as a disk does."""

    def fail(number: int) -> None:
        if number in numbers:
            raise OSError(errno.EIO, "Input/output error", "train/a-00000.arrow")

    return fail


def test_a_read_that_fails_three_times_is_made_a_fourth_time(caplog: pytest.LogCaptureFixture) -> None:
    _, rows = numbered(8, failing(range(2, 5)))
    order = UniformOrder(3, 8)
    with prefetched_batches(
        rows, BatchConfig(global_batch_size=2, micro_batch_size=2), group(), order, 0, depth=1, loader=AT_ONCE
    ) as batches:
        taken = [row for _ in range(3) for row in rows_in(next(batches).micro_batches)]
    assert taken == order.rows_at(0, 6).tolist()
    assert caplog.text.count("Input/output error: 'train/a-00000.arrow'; reading it again in 0.0 s") == 3


def test_a_read_that_fails_four_times_is_raised_at_its_batch_and_names_the_file() -> None:
    rows, as_rows = numbered(8, failing(range(2, 6)))
    with prefetched_batches(
        as_rows, BatchConfig(global_batch_size=2, micro_batch_size=2), group(), UniformOrder(3, 8), 0, depth=2, loader=AT_ONCE
    ) as batches:
        next(batches)
        with pytest.raises(
            StorageError, match=r"train/a-00000\.arrow: input/output error.*; look .* \(4 attempts to read it failed\)"
        ):
            next(batches)
    assert rows.reads == 5


def test_closing_does_not_wait_for_a_read_that_is_to_be_made_again() -> None:
    failed = threading.Event()

    def fail(number: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    rows, as_rows = numbered(8, fail)
    with prefetched_batches(
        as_rows,
        BatchConfig(global_batch_size=2, micro_batch_size=2),
        group(),
        UniformOrder(3, 8),
        0,
        depth=2,
        loader=LoaderConfig(retry_waits_s=(5.0,)),
    ):
        failed.wait()
    assert rows.reads == 1
    assert not loader_threads()


def test_each_wait_is_that_of_the_settings_and_ends_when_the_loader_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return self.is_set()  # closing sets it, so no wait outlasts the loader

    def fail(number: int) -> None:
        if number == 4:
            raise ShardError("train/a-00000.arrow", "train/a-00000.arrow: damaged")
        failing(range(1, 4))(number)

    monkeypatch.setattr("trainer.data.loader.threading", SimpleNamespace(Event=Recorded))
    rows, as_rows = numbered(8, fail)
    loader = LoaderConfig(retry_waits_s=(70.0, 80.0, 90.0))
    with prefetched_batches(as_rows, TWO_ROWS, group(), UniformOrder(3, 8), 0, depth=1, loader=loader) as batches:
        next(batches)
    assert waits == [70.0, 80.0, 90.0, 70.0]
    assert rows.reads >= 5


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_read_ahead_than_the_depth(depth: int) -> None:
    rows, as_rows = numbered(8)
    enough, too_much = threading.Event(), threading.Event()

    def watch(number: int) -> None:
        if number == 10 + depth:
            enough.set()
        if number > 10 + depth:
            too_much.set()

    rows.before_read = watch
    with prefetched_batches(
        as_rows, BatchConfig(global_batch_size=2, micro_batch_size=2), group(), UniformOrder(0, 8), 0, depth
    ) as batches:
        for _ in range(10):
            next(batches)
        assert enough.wait(60)
        assert not too_much.wait(0.2)
    assert not loader_threads()


@given(lengths=st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_the_halves_of_a_micro_batch_are_what_its_rows_alone_would_make(lengths: list[list[int]], seed: int) -> None:
    rows, middle = packed(lengths, seed), len(lengths) // 2
    wanted = {"with_weights": True, "with_bounds": True}
    halves = micro_batch(rows, **wanted).halves()
    for half, part in zip(halves, (slice(0, middle), slice(middle, None)), strict=True):
        alone = micro_batch(RowBatch(rows.tokens_BL[part], rows.segments_BL[part]), **wanted)
        assert all(torch.equal(vars(half)[name], tensor) for name, tensor in vars(alone).items())


class ShardedRows(NumberedRows):
    """Rows in shards of four; some of the shards may be padding."""

    row_length = LENGTH

    def without(self, shards: frozenset[str]) -> "ShardedRows":
        rows = ShardedRows(self.num_rows, self.before_read)
        rows.blank = shards
        return rows

    blank: frozenset[str] = frozenset()

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        batch = super().read(indices)
        batch.segments_BL[[f"train/{row // 4}" in self.blank for row in indices.tolist()]] = -1
        return batch


def test_rows_change_with_the_step_that_they_are_for() -> None:
    rows, order, config = ShardedRows(16), UniformOrder(2, 16), BatchConfig(global_batch_size=8, micro_batch_size=4)
    adjustments = Adjustments(
        (Adjustment(step=4, reason="memory", micro=2), Adjustment(step=5, reason="data", shards=("train/1",)))
    )
    with prefetched_batches(
        cast(Rows, rows), config, group(), order, 16, 2, first_step=3, adjustments=adjustments, shard_of=lambda _: None
    ) as batches:
        taken = [next(batches) for _ in range(3)]
    assert [(batch.num_micro_batches, len(batch.micro_batches)) for batch in taken] == [(2, 2), (4, 4), (4, 4)]
    assert [row for batch in taken for row in rows_in(batch.micro_batches)] == order.rows_at(16, 24).tolist()
    for batch, blank in zip(taken, (set(), set(), {4, 5, 6, 7}), strict=True):
        padding = {
            int(micro.tokens[row, 0]) for micro in batch.micro_batches for row in range(2) if int(micro.segments[row, 0]) < 0
        }
        assert padding == blank & set(batch.rows.tolist())


def test_a_shard_that_cannot_be_read_gives_padding_of_the_same_shape_and_the_reason(caplog: pytest.LogCaptureFixture) -> None:

    def fail(number: int) -> None:
        if number in (3, 4):
            raise ShardError("train/1", "train/1: damaged")

    rows, order = ShardedRows(16, fail), UniformOrder(2, 16)
    config = BatchConfig(global_batch_size=4, micro_batch_size=2)
    with prefetched_batches(
        cast(Rows, rows),
        config,
        group(1, 2),
        order,
        0,
        1,
        with_weights=True,
        loader=AT_ONCE,
        shard_of=lambda error: getattr(error, "shard", None),
    ) as batches:
        taken = [next(batches) for _ in range(4)]
    assert [batch.fault is not None for batch in taken] == [False, False, True, False]
    [lost] = [batch for batch in taken if batch.fault]
    assert lost.fault is not None
    assert (lost.fault.shard, str(lost.fault.error)) == ("train/1", "train/1: damaged")
    assert (lost.start, lost.rows.tolist()) == (8, order.rows_at(8, 4).tolist())
    [micro] = lost.micro_batches
    assert micro.tokens.shape == taken[0].micro_batches[0].tokens.shape
    assert micro.weights is not None
    assert micro.weights.sum() == 0
    assert (micro.targets == IGNORE).all()
    assert caplog.text.count("the first attempt to read a shard failed, trying once more: train/1: damaged") == 1


def test_a_damaged_shard_that_is_put_back_in_time_is_read_as_if_nothing_had_been() -> None:

    def fail(number: int) -> None:
        if number == 2:
            raise ShardError("train/1", "train/1: damaged")

    _, rows = numbered(8, fail)
    with prefetched_batches(
        rows, BatchConfig(global_batch_size=2, micro_batch_size=2), group(), UniformOrder(0, 8), 0, depth=4, loader=AT_ONCE
    ) as batches:
        assert [row for _ in range(3) for row in rows_in(next(batches).micro_batches)] == UniformOrder(0, 8).rows_at(0, 6).tolist()


@settings(max_examples=30)
@given(readers=st.integers(1, 6), depth=st.integers(1, 6), failing_read=st.integers(1, 12), left_out=st.integers(0, 20))
def test_any_number_of_readers_gives_the_same_batches_in_the_same_order(
    readers: int, depth: int, failing_read: int, left_out: int
) -> None:
    def slow(number: int) -> None:
        if number == failing_read:
            time.sleep(0.002)  # later batches are ready before this one

    config, order = BatchConfig(global_batch_size=4, micro_batch_size=2), UniformOrder(7, 19)
    taken = []
    for loader in (LoaderConfig(), LoaderConfig(readers=readers)):
        _, rows = numbered(19, slow)
        with prefetched_batches(
            rows, config, group(), order, 3, depth, loader=loader, left_out=[(left_out, left_out + 5)]
        ) as batches:
            taken.append([(batch.start, rows_in(batch.micro_batches)) for batch in islice(batches, 8)])
    assert taken[0] == taken[1]


def test_several_readers_read_at_the_same_time_and_no_more_than_the_depth() -> None:
    together, have_met = threading.Barrier(3), threading.Event()

    def meet(_: int) -> None:
        if not have_met.is_set():
            together.wait(60)  # raises an error if one reader waits alone
            have_met.set()

    _, rows = numbered(64, meet)
    with prefetched_batches(rows, TWO_ROWS, group(), UniformOrder(0, 64), 0, depth=3, loader=LoaderConfig(readers=8)) as batches:
        assert len(loader_threads()) == 3
        next(batches)
    assert not loader_threads()


def test_an_error_is_raised_at_its_batch_and_closing_waits_for_no_other_reader() -> None:
    order, config = UniformOrder(0, 64), BatchConfig(global_batch_size=2, micro_batch_size=2)
    bad = set(order.rows_at(4, 2).tolist())

    class Damaged(NumberedRows):
        def read(self, indices: NDArray[np.int64]) -> RowBatch:
            if set(indices.tolist()) == bad:
                raise PreparedDataError("train/a-00000.arrow: damaged")
            return super().read(indices)

    with prefetched_batches(cast(Rows, Damaged(64)), config, group(), order, 0, depth=6, loader=LoaderConfig(readers=4)) as batches:
        assert [next(batches).start for _ in range(2)] == [0, 2]
        with pytest.raises(PreparedDataError, match="a-00000"):
            next(batches)
    assert not loader_threads()


def test_a_batch_before_a_failed_one_is_read_even_if_its_reader_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    order, config = UniformOrder(0, 64), BatchConfig(global_batch_size=2, micro_batch_size=2)
    first, has_failed = set(order.rows_at(0, 2).tolist()), threading.Event()

    class Late(threading.Event):
        def is_set(self) -> bool:
            if not has_failed.is_set() and threading.current_thread().name == "loader_0":
                has_failed.wait(60)
                time.sleep(0.05)  # the other reader notes its failure
            return super().is_set()

    class Damaged(NumberedRows):
        def read(self, indices: NDArray[np.int64]) -> RowBatch:
            if set(indices.tolist()) != first:
                has_failed.set()
                raise PreparedDataError("train/a-00000.arrow: damaged")
            return super().read(indices)

    monkeypatch.setattr("trainer.data.loader.threading", SimpleNamespace(Event=Late))
    with prefetched_batches(cast(Rows, Damaged(64)), config, group(), order, 0, depth=2, loader=LoaderConfig(readers=2)) as batches:
        assert next(batches).start == 0
        with pytest.raises(PreparedDataError, match="a-00000"):
            next(batches)


def test_without_waits_a_damaged_shard_is_not_read_again() -> None:
    def fail(_: int) -> None:
        raise ShardError("train/1", "train/1: damaged")

    rows, as_rows = numbered(8, fail)
    never = LoaderConfig(retry_waits_s=())
    with (
        prefetched_batches(as_rows, TWO_ROWS, group(), UniformOrder(3, 8), 0, depth=1, loader=never) as batches,
        pytest.raises(ShardError, match="train/1: damaged"),
    ):
        next(batches)
    assert rows.reads == 1


def test_without_waits_a_read_is_not_tried_again() -> None:
    rows, as_rows = numbered(8, failing(range(1, 9)))
    config, never = BatchConfig(global_batch_size=2, micro_batch_size=2), LoaderConfig(retry_waits_s=())
    with (
        prefetched_batches(as_rows, config, group(), UniformOrder(3, 8), 0, depth=1, loader=never) as batches,
        pytest.raises(StorageError, match=r"\(1 attempt to read it failed\)"),
    ):
        next(batches)
    assert rows.reads == 1
