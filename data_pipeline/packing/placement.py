"""Place documents in rows of fixed length. The placement is a pure function of the lengths.

Each later piece of a document begins with the last token of the piece before it, so every token but the first is a target once.
Best-fit decreasing cuts only documents longer than a row, then places the pieces, longest first, each in the row with the least
room that can take it (Ding et al., "Fewer Truncations Improve Language Modeling", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_pipeline.text import Int64s

Method = Literal["best-fit", "greedy", "one-per-row"]
METHODS: tuple[Method, ...] = ("best-fit", "greedy", "one-per-row")


@dataclass(frozen=True)
class Packing:
    """Pieces of documents in order: row by row, and from left to right in each row."""

    rows: Int64s
    documents: Int64s  # document of each piece, as an index into the packed lengths
    starts: Int64s  # first token of each piece in its document
    lengths: Int64s
    num_rows: int


def pack(lengths: Int64s, row_length: int, method: Method) -> Packing:
    """Place documents of `lengths` tokens (each at least 1) in rows of `row_length` tokens (at least 2)."""
    if method == "greedy":
        return _pack_greedy(lengths, row_length)
    pieces, starts, piece_lengths = _cut(lengths, row_length)
    if method == "one-per-row":
        return Packing(np.arange(len(pieces)), pieces, starts, piece_lengths, len(pieces))
    rows = best_fit_decreasing(piece_lengths, row_length)
    order = np.lexsort((np.arange(len(rows)), rows))
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    return Packing(rows[order], pieces[order], starts[order], piece_lengths[order], num_rows)


def count_packing(packing: Packing) -> dict[str, int]:
    """Return rows, cut documents, and tokens in the rows: those repeated at cuts count twice."""
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


def best_fit_decreasing(lengths: Int64s, row_length: int) -> Int64s:
    """Return the row of each piece. Rows are numbered in the order of their first piece, so input order is mostly preserved.

    Pieces of one length are placed together: the row with the least room for them stays the best while it can take one.
    """
    row_of_piece = np.empty(len(lengths), np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    rooms = 0  # bit r is set if rows_by_room[r] is not empty
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


def _cut(lengths: Int64s, row_length: int) -> tuple[Int64s, Int64s, Int64s]:
    stride = row_length - 1
    num_pieces = np.maximum(1, -(-(lengths - 1) // stride))
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first_piece[documents]) * stride
    return documents, starts, np.minimum(row_length, lengths[documents] - starts)
