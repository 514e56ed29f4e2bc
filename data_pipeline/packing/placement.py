"""Place documents in rows of fixed length. The placement is a pure function of the lengths.

A document longer than a row is cut into pieces that overlap by one token: each later piece begins with the last token of the piece
before it. So every token except the first of a document is a target exactly once, even if the document is cut.

Best-fit decreasing follows Ding et al., "Fewer Truncations Improve Language Modeling" (2024): cut only documents longer than a row,
then place the pieces, longest first, each in the row with the least room that can take it.
"""

from __future__ import annotations

import numpy as np

from data_pipeline.packing.best_fit import best_fit_decreasing
from data_pipeline.packing.pieces import Int64s, Method, Packing, cut

__all__ = ["count_packing", "pack"]


def pack(lengths: Int64s, row_length: int, method: Method) -> Packing:
    """Place documents of `lengths` tokens (each at least 1) in rows of `row_length` tokens (at least 2)."""
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
    """Return the numbers of rows, of cut documents, and of tokens in the rows. Tokens repeated at cuts count twice."""
    return {
        "rows": packing.num_rows,
        "cut_documents": int((np.bincount(packing.documents) > 1).sum()),
        "tokens": int(packing.lengths.sum()),
    }


def _pack_greedy(lengths: Int64s, row_length: int) -> Packing:
    """Fill one row after another in input order, and cut documents at the end of a row."""
    pieces: list[tuple[int, int, int, int]] = []
    row, room = 0, row_length
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while True:
            left = length - start
            if room < min(left, 2):  # a single token of a longer document would have no target and be none
                row, room = row + 1, row_length
            size = min(left, room)
            pieces.append((row, document, start, size))
            room -= size
            if size == left:
                break
            start += size - 1
    rows, documents, starts, sizes = np.ascontiguousarray(np.array(pieces, np.int64).reshape(-1, 4).T)
    return Packing(rows, documents, starts, sizes, row + 1 if pieces else 0)
