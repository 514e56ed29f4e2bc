"""Places documents in rows of fixed length: a pure function from lengths to places.

A document longer than a row is cut into pieces that overlap by one token: a piece that goes on begins with the last token of the
piece before, so that every token but a document's first is the target of the one before it exactly once, cut or not.

Best-fit decreasing is that of Ding et al., "Fewer Truncations Improve Language Modeling" (2024): cut only what is longer than a
row, then put the pieces, longest first, each in the row with the least room that still takes it.
"""

from __future__ import annotations

import numpy as np

from data_pipeline.packing.best_fit import best_fit_decreasing
from data_pipeline.packing.pieces import Int64s, Method, Packing, cut

__all__ = ["count_packing", "pack"]


def pack(lengths: Int64s, row_length: int, method: Method) -> Packing:
    """Places documents of `lengths` tokens (each at least 1) in rows of `row_length` (at least 2)."""
    if method == "greedy":
        return _pack_greedy(lengths, row_length)
    pieces, starts, piece_lengths = cut(lengths, row_length)
    if method == "one-per-row":
        return Packing(np.arange(len(pieces)), pieces, starts, piece_lengths, len(pieces))
    rows = best_fit_decreasing(piece_lengths, row_length)
    order = np.lexsort((np.arange(len(rows)), rows))
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    return Packing(rows[order], pieces[order], starts[order], piece_lengths[order], num_rows)


def count_packing(packing: Packing) -> dict[str, int]:
    """Rows, documents that are cut, and tokens in the rows, those repeated at cuts included."""
    return {
        "rows": packing.num_rows,
        "cut_documents": int((np.bincount(packing.documents) > 1).sum()),
        "tokens": int(packing.lengths.sum()),
    }


def _pack_greedy(lengths: Int64s, row_length: int) -> Packing:
    """Fills one row after the other in the order of the input, and cuts where a row ends."""
    pieces: list[tuple[int, int, int, int]] = []
    row, room = 0, row_length
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while True:
            left = length - start
            if room < min(left, 2):  # one token of a longer document would be no target and have none
                row, room = row + 1, row_length
            size = min(left, room)
            pieces.append((row, document, start, size))
            room -= size
            if size == left:
                break
            start += size - 1
    rows, documents, starts, sizes = np.ascontiguousarray(np.array(pieces, np.int64).reshape(-1, 4).T)
    return Packing(rows, documents, starts, sizes, row + 1 if pieces else 0)
