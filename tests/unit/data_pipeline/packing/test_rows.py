from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.shards import ShardContent
from data_pipeline.packing import rows
from data_pipeline.packing.placement import pack
from data_pipeline.packing.rows import Window, cut_into_shards, cut_into_windows, fill_rows

PAD = 0


def window_of(lengths: list[int], first_id: int = 0) -> Window:
    """Return documents whose tokens count up from 1, so each token identifies its position."""
    return Window(
        np.arange(first_id, first_id + len(lengths), dtype=np.uint64),
        np.array(lengths, np.int64),
        np.arange(1, sum(lengths) + 1, dtype=np.uint16),
    )


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
    window = window_of(lengths)
    with patch.object(rows, "FILL_TOKENS", fill_tokens):
        contents = list(fill_rows(window, pack(window.lengths_D, row_length, method), row_length, PAD))
    ends = np.cumsum(lengths)
    [content] = cut_into_shards(contents, sum(lengths))
    assert documents_of(content) == {
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
    documents = window_of([len(mask) for mask in masks])
    has_loss_T = np.concatenate([np.array(mask) for mask in masks])
    num_plain = first_masked % (len(masks) + 1)  # the first documents come from a table without a mask
    first, rest = documents.split(num_plain)
    has_loss_T[: len(first.tokens_T)] = True
    rest = replace(rest, has_loss_T=has_loss_T[len(first.tokens_T) :])
    windows = cut_into_windows([part for part in (first, rest) if len(part.ids_D)], window_tokens)
    with patch.object(rows, "FILL_TOKENS", 50):
        contents = [
            content
            for window in windows
            for content in fill_rows(window, pack(window.lengths_D, row_length, method), row_length, PAD)
        ]
    seen = set()
    for shard in cut_into_shards(contents, rows_per_shard):
        filled_RL = shard.tokens_RL != PAD
        tokens = shard.tokens_RL[filled_RL]
        mask = shard.mask or LossMask.everywhere(len(filled_RL))
        mask.check(filled_RL.sum(axis=1))
        assert mask.has_loss(filled_RL.sum(axis=1)).tolist() == has_loss_T[tokens.astype(int) - 1].tolist()
        seen |= set(tokens.tolist())
    assert seen == set(range(1, len(has_loss_T) + 1))


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=10), max_size=8), st.integers(1, 60))
def test_windows_hold_all_documents_in_order_and_close_as_soon_as_they_are_full(
    batches: list[list[int]], window_tokens: int
) -> None:
    first_ids = np.cumsum([0, *map(len, batches)])
    windows = list(
        cut_into_windows((window_of(batch, int(i)) for batch, i in zip(batches, first_ids, strict=False)), window_tokens)
    )
    assert [i for window in windows for i in window.ids_D.tolist()] == list(range(sum(map(len, batches))))
    assert [n for window in windows for n in window.lengths_D.tolist()] == [n for batch in batches for n in batch]
    for window in windows:
        assert window.lengths_D.sum() == len(window.tokens_T)
        assert window.lengths_D[:-1].sum() < window_tokens
    assert all(len(window.tokens_T) >= window_tokens for window in windows[:-1])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 10))
def test_shards_hold_all_rows_in_order_and_are_full_but_for_the_last(row_counts: list[int], rows_per_shard: int) -> None:
    def content(num_rows: int, first: int) -> ShardContent:
        numbers = np.arange(first, first + num_rows)
        return ShardContent(
            np.repeat(numbers[:, None], 4, axis=1).astype(np.uint16),
            np.ones(2 * num_rows, np.uint32),
            np.repeat(numbers, 2).astype(np.uint64),
            np.full(num_rows, 2),
        )

    firsts = np.cumsum([0, *row_counts])
    shards = list(cut_into_shards((content(n, int(f)) for n, f in zip(row_counts, firsts, strict=False)), rows_per_shard))
    assert [row for shard in shards for row in shard.tokens_RL[:, 0].tolist()] == list(range(sum(row_counts)))
    assert [len(shard.tokens_RL) for shard in shards[:-1]] == [rows_per_shard] * (len(shards) - 1)
    for shard in shards:
        assert shard.documents_S[::2].tolist() == shard.tokens_RL[:, 0].tolist()
