from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.layout import LOSS_RUNS
from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.shards import ShardContent
from data_pipeline.packing import rows
from data_pipeline.packing.placement import pack
from data_pipeline.packing.rows import Window, fill_rows, num_tokens_of, regroup

PAD = 0


def documents_with(lengths: list[int], first_id: int = 0, first_token: int = 1) -> pa.RecordBatch:
    """Return documents whose tokens count up, so each token identifies its position."""
    tokens = pa.array(np.arange(first_token, first_token + sum(lengths), dtype=np.uint16))
    columns = {
        "id": pa.array(np.arange(first_id, first_id + len(lengths), dtype=np.uint64)),
        "tokens": pa.LargeListArray.from_arrays(pa.array(np.cumsum([0, *lengths])), tokens),
    }
    return pa.record_batch(columns)


def ones(rows: pa.RecordBatch) -> np.ndarray:
    return np.ones(rows.num_rows, np.int64)


def documents_of(content: ShardContent) -> dict[int, set[int]]:
    """Return the tokens of each document, from all its pieces."""
    texts: dict[int, set[int]] = {}
    segment = 0
    for tokens, num_segments in zip(content.tokens_RL, content.num_segments_R, strict=True):
        position = 0
        for _ in range(num_segments):
            length = int(content.segments_S[segment])
            piece = tokens[position : position + length].tolist()
            assert piece == list(range(piece[0], piece[0] + length))
            texts.setdefault(int(content.documents_S[segment]), set()).update(piece)
            position, segment = position + length, segment + 1
        assert (tokens[position:] == PAD).all()
    return texts


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(2, 25),
    st.sampled_from(["best-fit", "greedy"]),
    st.sampled_from([1, 100, 10_000]),
)
def test_documents_can_be_read_back_from_the_rows(lengths: list[int], row_length: int, method: str, fill_tokens: int) -> None:
    window = Window.of(documents_with(lengths))
    with patch.object(rows, "FILL_TOKENS", fill_tokens):
        batches = list(fill_rows(window, pack(window.lengths_D, row_length, method), row_length, PAD, has_pairs=False))
    ends = np.cumsum(lengths)
    [batch] = regroup(batches, sum(lengths) + 1, ones)
    assert documents_of(ShardContent.of(batch)) == {
        document: set(range(end - length + 1, end + 1))
        for document, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True))
    }


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=60), min_size=1, max_size=20),
    st.integers(2, 25),
    st.sampled_from(["best-fit", "greedy", "one-per-row"]),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 20),
)
def test_a_loss_mask_follows_its_tokens_through_windows_rows_and_shards(
    masks: list[list[bool]], row_length: int, method: str, window_tokens: int, rows_per_shard: int, first_masked: int
) -> None:
    lengths = [len(mask) for mask in masks]
    has_loss_T = np.concatenate([np.array(mask) for mask in masks])
    num_plain = first_masked % (len(masks) + 1)  # the first documents come from a table without a mask
    num_plain_tokens = sum(lengths[:num_plain])
    has_loss_T[:num_plain_tokens] = True
    plain = documents_with(lengths[:num_plain])
    rest = documents_with(lengths[num_plain:], num_plain, num_plain_tokens + 1)
    mask = LossMask.of(has_loss_T[num_plain_tokens:], np.array(lengths[num_plain:], np.int64))
    runs = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *mask.num_runs_B]).astype(np.int32)), pa.array(mask.runs_N))
    batches = (plain, rest.append_column(LOSS_RUNS, runs))
    with patch.object(rows, "FILL_TOKENS", 50):
        contents = [
            content
            for window in map(Window.of, regroup(batches, window_tokens, num_tokens_of))
            for content in fill_rows(window, pack(window.lengths_D, row_length, method), row_length, PAD, has_pairs=False)
        ]
    seen = set()
    for shard in map(ShardContent.of, regroup(contents, rows_per_shard, ones)):
        filled_RL = shard.tokens_RL != PAD
        tokens = shard.tokens_RL[filled_RL]
        mask = shard.mask or LossMask(np.empty(0, np.uint32), np.zeros(len(filled_RL), np.int64))
        mask.check(filled_RL.sum(axis=1))
        assert mask.has_loss(filled_RL.sum(axis=1)).tolist() == has_loss_T[tokens.astype(int) - 1].tolist()
        seen |= set(tokens.tolist())
    assert seen == set(range(1, len(has_loss_T) + 1))


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=10), max_size=8), st.integers(1, 60))
def test_windows_hold_all_documents_in_order_and_close_as_soon_as_they_are_full(
    batches: list[list[int]], window_tokens: int
) -> None:
    first_ids = np.cumsum([0, *map(len, batches)])
    documents = [documents_with(batch, int(i)) for batch, i in zip(batches, first_ids, strict=False)]
    windows = list(map(Window.of, regroup(documents, window_tokens, num_tokens_of)))
    assert [i for window in windows for i in window.ids_D.tolist()] == list(range(sum(map(len, batches))))
    assert [n for window in windows for n in window.lengths_D.tolist()] == [n for batch in batches for n in batch]
    for window in windows:
        assert window.lengths_D.sum() == len(window.tokens_T)
        assert window.lengths_D[:-1].sum() < window_tokens
    assert all(len(window.tokens_T) >= window_tokens for window in windows[:-1])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 10))
def test_shards_hold_all_rows_in_order_and_are_full_but_for_the_last(row_counts: list[int], rows_per_shard: int) -> None:
    def batch(num_rows: int, first: int) -> pa.RecordBatch:
        numbers = np.arange(first, first + num_rows)
        return ShardContent(
            np.repeat(numbers[:, None], 4, axis=1).astype(np.uint16),
            np.ones(2 * num_rows, np.uint32),
            np.repeat(numbers, 2).astype(np.uint64),
            np.full(num_rows, 2),
        ).batch

    firsts = np.cumsum([0, *row_counts])
    batches = [batch(n, int(f)) for n, f in zip(row_counts, firsts, strict=False)]
    shards = [ShardContent.of(shard) for shard in regroup(batches, rows_per_shard, ones)]
    assert [row for shard in shards for row in shard.tokens_RL[:, 0].tolist()] == list(range(sum(row_counts)))
    assert [len(shard.tokens_RL) for shard in shards[:-1]] == [rows_per_shard] * (len(shards) - 1)
    for shard in shards:
        assert shard.documents_S[::2].tolist() == shard.tokens_RL[:, 0].tolist()
