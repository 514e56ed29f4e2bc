"""Places documents in rows of fixed length: a pure function from lengths to places.

A document longer than a row is cut into pieces that overlap by one token: a piece that goes on begins with the last token of the
piece before, so that every token but a document's first is the target of the one before it exactly once, cut or not.

Best-fit decreasing is that of Ding et al., "Fewer Truncations Improve Language Modeling" (2024): cut only what is longer than a
row, then put the pieces, longest first, each in the row with the least room that still takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["METHODS", "Method", "Packing", "count_packing", "pack"]

Int64s = NDArray[np.int64]
Method = Literal["best-fit", "greedy", "one-per-row"]
METHODS: tuple[Method, ...] = ("best-fit", "greedy", "one-per-row")


@dataclass(frozen=True)
class Packing:
    """Pieces of documents in the order in which they stand: row by row, and in a row from left to right."""

    rows: Int64s
    """Row of each piece, not falling."""
    documents: Int64s
    """Index into the lengths that were packed."""
    starts: Int64s
    """First token of the piece within its document."""
    lengths: Int64s
    """Number of its tokens."""
    num_rows: int


def pack(lengths: Int64s, row_length: int, method: Method) -> Packing:
    """Places documents of `lengths` tokens (each at least 1) in rows of `row_length` (at least 2)."""
    if method == "greedy":
        return _pack_greedy(lengths, row_length)
    pieces, starts, piece_lengths = _cut(lengths, row_length)
    if method == "one-per-row":
        return Packing(np.arange(len(pieces)), pieces, starts, piece_lengths, len(pieces))
    rows = _best_fit_decreasing(piece_lengths, row_length)
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


def _cut(lengths: Int64s, row_length: int) -> tuple[Int64s, Int64s, Int64s]:
    """Document, start and length of each piece, when only what is longer than a row is cut."""
    stride = row_length - 1
    num_pieces = np.maximum(1, -(-(lengths - 1) // stride))
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first_piece[documents]) * stride
    return documents, starts, np.minimum(row_length, lengths[documents] - starts)


def _best_fit_decreasing(lengths: Int64s, row_length: int) -> Int64s:
    """The row of each piece; rows are numbered by the first piece in them, so that neighbours in the input stay neighbours.

    Pieces of one length are placed together. That changes nothing: the row a piece went into has the least room of all that could
    take it, and less after, so as long as it takes one more of the same length it is the best fit for it.
    """
    row_of_piece = np.empty(len(lengths), np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    rooms = 0  # bit r is set where rows_by_room[r] is not empty
    num_rows = 0
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    position = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = position + count
        while position < end:
            left = end - position
            if candidates := rooms >> size:
                room = size + (candidates & -candidates).bit_length() - 1
                per_row = room // size
                stock = rows_by_room[room]
                num_kept = max(len(stock) + -left // per_row, 0)
                rows = stock[num_kept:]
                del stock[num_kept:]
                if not stock:
                    rooms ^= 1 << room
            else:
                room = row_length
                per_row = room // size
                rows = list(range(num_rows, num_rows - (-left // per_row)))
                num_rows += len(rows)
            placed = min(left, per_row * len(rows))
            row_of_piece[by_length[position : position + placed]] = np.repeat(rows, per_row)[:placed]
            position += placed
            in_last_row = placed - per_row * (len(rows) - 1)
            for emptied, changed in ((room - per_row * size, rows[:-1]), (room - in_last_row * size, rows[-1:])):
                if emptied and changed:
                    rows_by_room[emptied] += changed
                    rooms |= 1 << emptied
    _, first_pieces, compact = np.unique(row_of_piece, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_pieces))[compact]


def _pack_greedy(lengths: Int64s, row_length: int) -> Packing:
    """Fills one row after the other in the order of the input, and cuts where a row ends."""
    rows, documents, starts, taken = [], [], [], []
    row, room = 0, row_length
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while True:
            left = length - start
            if room < min(left, 2):  # one token of a longer document would be no target and have none
                row, room = row + 1, row_length
            size = min(left, room)
            rows.append(row)
            documents.append(document)
            starts.append(start)
            taken.append(size)
            room -= size
            if size == left:
                break
            start += size - 1
    return Packing(
        np.array(rows, np.int64),
        np.array(documents, np.int64),
        np.array(starts, np.int64),
        np.array(taken, np.int64),
        row + 1 if rows else 0,
    )
