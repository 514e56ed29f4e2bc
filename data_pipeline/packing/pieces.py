"""The pieces of documents and the rows that they are placed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["METHODS", "Method", "Packing", "cut"]

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


def cut(lengths: Int64s, row_length: int) -> tuple[Int64s, Int64s, Int64s]:
    """Document, start and length of each piece, when only what is longer than a row is cut."""
    stride = row_length - 1
    num_pieces = np.maximum(1, -(-(lengths - 1) // stride))
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first_piece[documents]) * stride
    return documents, starts, np.minimum(row_length, lengths[documents] - starts)
