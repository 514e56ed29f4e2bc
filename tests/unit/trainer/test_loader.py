import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_pipeline.errors import PreparedDataError
from data_pipeline.shards import RowBatch
from trainer.config import BatchConfig
from trainer.distributed import Group
from trainer.loader import micro_batch, prefetched_batches, share_of_rank
from trainer.loss import IGNORE
from trainer.order import rows_at

LENGTH = 16


class NumberedRows:
    """Rows that say which they are: every token of row i is i. One document of `LENGTH` tokens each."""

    def __init__(self, num_rows: int, broken_from: int | None = None) -> None:
        self.num_rows, self.reads, self.broken_from = num_rows, 0, broken_from

    def __len__(self) -> int:
        return self.num_rows

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        self.reads += 1
        if self.broken_from is not None and self.reads > self.broken_from:
            raise PreparedDataError("train/a-00000.arrow: damaged")
        tokens = np.repeat(indices.astype(np.uint16)[:, None], LENGTH, axis=1)
        return RowBatch(tokens, np.zeros(tokens.shape, dtype=np.int32))

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(len(indices), LENGTH - 1)


def group(rank: int = 0, world_size: int = 1) -> Group:
    return Group(rank, world_size, rank, torch.device("cpu"))


def rows_of_rank(num_rows: int, config: BatchConfig, member: Group, start: int, count: int) -> list[list[int]]:
    rows = NumberedRows(num_rows)
    with prefetched_batches(rows, config, member, 5, start, depth=2) as batches:  # type: ignore[arg-type]
        taken = [next(batches) for _ in range(count)]
    return [[int(row) for micro in batch.micro_batches for row in micro.tokens[:, 0]] for batch in taken]


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_target_is_the_next_token_of_the_same_document(lengths: list[list[int]], seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 100, (len(lengths), 24), dtype=np.uint16)
    segments = np.full((len(lengths), 24), -1, dtype=np.int32)
    for row, documents in enumerate(lengths):
        segments[row, : sum(documents)] = np.repeat(np.arange(len(documents)), documents)
    batch = micro_batch(RowBatch(tokens, segments))
    for row, documents in enumerate(lengths):
        expected_targets, expected_positions, start = [], [], 0
        for length in documents:
            expected_targets += [*tokens[row, start + 1 : start + length].tolist(), IGNORE]
            expected_positions += range(length)
            start += length
        assert batch.targets[row].tolist() == expected_targets + [IGNORE] * (24 - start)
        assert batch.positions[row, :start].tolist() == expected_positions


@given(micro_batches=st.integers(1, 64), world_size=st.integers(1, 64))
def test_the_shares_of_the_ranks_are_consecutive_complete_and_even(micro_batches: int, world_size: int) -> None:
    shares = [share_of_rank(micro_batches, group(rank, world_size)) for rank in range(world_size)]
    assert [number for share in shares for number in share] == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_together_read_the_order_exactly(world_size: int) -> None:
    config = BatchConfig(global_rows=12, micro=2)
    by_rank = [rows_of_rank(31, config, group(rank, world_size), start=24, count=5) for rank in range(world_size)]
    together = [[row for ranks in by_rank for row in ranks[number]] for number in range(5)]
    assert together == rows_at(5, 24, 60, 31).reshape(5, 12).tolist()


def test_a_fresh_loader_goes_on_exactly_where_another_was_left() -> None:
    config = BatchConfig(global_rows=4, micro=2)
    whole = rows_of_rank(7, config, group(), start=0, count=12)
    for step in range(12):
        assert rows_of_rank(7, config, group(), start=4 * step, count=1) == whole[step : step + 1]


def test_an_error_while_reading_ahead_is_raised_at_its_batch() -> None:
    rows = NumberedRows(8, broken_from=2)
    with prefetched_batches(rows, BatchConfig(global_rows=2, micro=2), group(), 0, 0, depth=4) as batches:  # type: ignore[arg-type]
        next(batches)
        next(batches)
        with pytest.raises(PreparedDataError, match="a-00000"):
            next(batches)


def test_no_more_is_read_ahead_than_the_depth() -> None:
    rows = NumberedRows(8)
    with prefetched_batches(rows, BatchConfig(global_rows=2, micro=2), group(), 0, 0, depth=3) as batches:  # type: ignore[arg-type]
        for _ in range(10):
            next(batches)
    assert rows.reads <= 10 + 3 + 1
