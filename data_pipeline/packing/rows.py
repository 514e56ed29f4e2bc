"""Build the rows of shards. Shape suffixes: D documents of a window, T all their tokens; R, L and S as in `shards`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.dataset.layout import LOSS_RUNS
from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.shards import ShardContent, Tokens
from data_pipeline.packing.placement import Packing
from data_pipeline.text import Int64s

FILL_TOKENS = 1 << 20  # in the rows that are filled at a time; no digest depends on it


@dataclass(frozen=True)
class Window:
    ids_D: NDArray[np.uint64]
    lengths_D: NDArray[np.int64]
    tokens_T: Tokens
    has_loss_T: NDArray[np.bool_] | None = None  # None if the source has no loss mask

    @staticmethod
    def of(documents: pa.RecordBatch) -> Window:
        """`documents` are rows of a token table; those without runs have a loss on every token."""
        lengths_D, has_loss_T = num_tokens_of(documents), None
        if LOSS_RUNS in documents.schema.names:
            has_loss_T = LossMask.in_column(documents.column(LOSS_RUNS)).has_loss(lengths_D)
        return Window(documents.column("id").to_numpy(), lengths_D, documents.column("tokens").flatten().to_numpy(), has_loss_T)


def num_tokens_of(documents: pa.RecordBatch) -> Int64s:
    lengths_D: Int64s = np.diff(documents.column("tokens").offsets.to_numpy())
    return lengths_D


def regroup(
    batches: Iterable[pa.RecordBatch], least: int, sizes_of: Callable[[pa.RecordBatch], Int64s]
) -> Iterator[pa.RecordBatch]:
    """Regroup all rows in order. Each batch except the last ends with the row that reaches `least`, by the sizes of the rows."""
    parts: list[pa.RecordBatch] = []
    missing = least
    for batch in batches:
        rest, ends = batch, np.cumsum(sizes_of(batch))
        while len(ends) and ends[-1] >= missing:
            num_rows = int(np.searchsorted(ends, missing)) + 1
            whole = _joined([*parts, rest.slice(0, num_rows)])
            rest, ends = rest.slice(num_rows), ends[num_rows:] - ends[num_rows - 1]
            parts, missing = [], least
            yield whole
            del whole  # frees it before the next one is gathered
        if len(ends):
            parts.append(rest)
            missing -= int(ends[-1])
    if parts:
        yield _joined(parts)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches. Lists of a column that some of them lack are null there."""
    tables = [pa.Table.from_batches([part]) for part in parts]
    [batch] = pa.concat_tables(tables, promote_options="default").combine_chunks().to_batches()
    return batch


def fill_rows(window: Window, packing: Packing, row_length: int, pad_id: int, *, has_pairs: bool) -> Iterator[pa.RecordBatch]:
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
        yield ShardContent(tokens_RL, lengths.astype(np.uint32), ids_S, num_segments_R, mask).batch
