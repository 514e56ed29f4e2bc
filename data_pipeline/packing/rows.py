"""Build the rows of shards. Shape suffixes: D documents of a window, T all their tokens; R, L and S as in `shards`."""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.shards import ShardContent, Tokens
from data_pipeline.packing.placement import Packing

FILL_TOKENS = 1 << 20  # in the rows that are filled at a time; no digest depends on it


@dataclass(frozen=True)
class Window:
    ids_D: NDArray[np.uint64]
    lengths_D: NDArray[np.int64]
    tokens_T: Tokens
    has_loss_T: NDArray[np.bool_] | None = None  # None if the source has no loss mask

    @staticmethod
    def join(parts: list[Window]) -> Window:
        """Concatenate windows. If one has a loss mask, tokens of windows without a mask have a loss."""
        if len(parts) == 1:
            return parts[0]
        has_mask = any(part.has_loss_T is not None for part in parts)
        masks = [np.ones(len(part.tokens_T), np.bool_) if part.has_loss_T is None else part.has_loss_T for part in parts]
        return Window(
            np.concatenate([part.ids_D for part in parts]),
            np.concatenate([part.lengths_D for part in parts]),
            np.concatenate([part.tokens_T for part in parts]),
            np.concatenate(masks) if has_mask else None,
        )

    def split(self, num_documents: int) -> tuple[Window, Window]:
        num_tokens = int(self.lengths_D[:num_documents].sum())

        def part(documents: slice, tokens: slice) -> Window:
            has_loss_T = None if self.has_loss_T is None else self.has_loss_T[tokens]
            return Window(self.ids_D[documents], self.lengths_D[documents], self.tokens_T[tokens], has_loss_T)

        return part(slice(num_documents), slice(num_tokens)), part(slice(num_documents, None), slice(num_tokens, None))


def cut_into_windows(batches: Iterable[Window], window_tokens: int) -> Iterator[Window]:
    """Regroup the documents of all batches. Each window except the last ends with the document that reaches `window_tokens`."""
    pending: list[Window] = []
    pending_tokens = 0
    for batch in batches:
        rest = batch
        while pending_tokens + len(rest.tokens_T) >= window_tokens:
            ends_D = np.cumsum(rest.lengths_D)
            first, rest = rest.split(int(np.searchsorted(ends_D, window_tokens - pending_tokens)) + 1)
            window = Window.join([*pending, first])
            pending, pending_tokens = [], 0  # before `yield`, or the tokens would be in memory twice
            yield window
        if len(rest.ids_D):
            pending.append(rest)
            pending_tokens += len(rest.tokens_T)
    if pending:
        yield Window.join(pending)


def fill_rows(window: Window, packing: Packing, row_length: int, pad_id: int, *, has_pairs: bool = False) -> Iterator[ShardContent]:
    """Yield some rows at a time: all of them would be another copy of the window. With `has_pairs` a document has two segments."""
    firsts_D = np.cumsum(window.lengths_D) - window.lengths_D
    begins = firsts_D[packing.documents] + packing.starts
    rows_at_once = max(1, FILL_TOKENS // row_length)
    for first in range(0, packing.num_rows, rows_at_once):
        num_rows = min(rows_at_once, packing.num_rows - first)
        some = slice(*np.searchsorted(packing.rows, (first, first + num_rows)).tolist())
        rows, lengths = packing.rows[some] - first, packing.lengths[some]
        pieces = list(map(slice, begins[some].tolist(), (begins[some] + lengths).tolist()))
        filled_R = np.bincount(rows, lengths, num_rows).astype(np.int64)
        tokens_RL = np.full((num_rows, row_length), pad_id, window.tokens_T.dtype)
        # Pieces are in the order of the rows, so their concatenation fills all positions without padding in order.
        tokens_RL[np.arange(row_length) < filled_R[:, None]] = np.concatenate([window.tokens_T[piece] for piece in pieces])
        ids_S, num_segments_R = window.ids_D[packing.documents[some]], np.bincount(rows, minlength=num_rows)
        mask = None
        if window.has_loss_T is not None:
            mask = LossMask.of(np.concatenate([window.has_loss_T[piece] for piece in pieces]), filled_R)
            if has_pairs:
                # The first answer with its prompt ends where the prompt of the second one, which has no loss, begins.
                losses = (window.has_loss_T[piece] for piece in pieces)
                chosen = np.array([1 + np.flatnonzero(one[:-1] & ~one[1:])[0] for one in losses], np.int64)
                lengths = np.stack([chosen, lengths - chosen], axis=1).reshape(-1)
                ids_S, num_segments_R = np.repeat(ids_S, 2), 2 * num_segments_R
        yield ShardContent(tokens_RL, lengths.astype(np.uint32), ids_S, num_segments_R, mask)


def cut_into_shards(contents: Iterable[ShardContent], rows_per_shard: int) -> Iterator[ShardContent]:
    """Regroup all rows in order. Each shard except the last has `rows_per_shard` rows. One shard at a time is in memory."""
    tokens_RL: Tokens | None = None
    parts: list[ShardContent] = []
    num_rows = 0
    for content in contents:
        rest = content
        while len(rest.tokens_RL):
            first, rest = _split_rows(rest, rows_per_shard - num_rows)
            if tokens_RL is None:
                tokens_RL = np.empty((rows_per_shard, first.tokens_RL.shape[1]), first.tokens_RL.dtype)
            place_RL = tokens_RL[num_rows : num_rows + len(first.tokens_RL)]
            place_RL[:] = first.tokens_RL
            parts.append(replace(first, tokens_RL=place_RL))
            num_rows += len(place_RL)
            if num_rows == rows_per_shard:
                shard = _join(tokens_RL, parts)
                tokens_RL, parts, num_rows = None, [], 0
                del first, place_RL
                yield shard
                del shard
    if tokens_RL is not None:
        yield _join(tokens_RL[:num_rows], parts)


def _split_rows(content: ShardContent, num_rows: int) -> tuple[ShardContent, ShardContent]:
    def part(rows: slice, segments: slice, mask: LossMask | None) -> ShardContent:
        tokens_RL, num_segments_R = content.tokens_RL[rows], content.num_segments_R[rows]
        return ShardContent(tokens_RL, content.segments_S[segments], content.documents_S[segments], num_segments_R, mask)

    num_segments = int(content.num_segments_R[:num_rows].sum())
    first, rest = (None, None) if content.mask is None else content.mask.split(num_rows)
    return part(slice(num_rows), slice(num_segments), first), part(slice(num_rows, None), slice(num_segments, None), rest)


def _join(tokens_RL: Tokens, parts: list[ShardContent]) -> ShardContent:
    has_mask = any(part.mask is not None for part in parts)
    return ShardContent(
        tokens_RL,
        np.concatenate([part.segments_S for part in parts]),
        np.concatenate([part.documents_S for part in parts]),
        np.concatenate([part.num_segments_R for part in parts]),
        LossMask.join([part.mask or LossMask.everywhere(len(part.tokens_RL)) for part in parts]) if has_mask else None,
    )
