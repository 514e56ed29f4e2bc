from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


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
