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
    """Pieces of documents in order: row by row, and from left to right in each row."""

    rows: Int64s
    """Row of each piece, in ascending order."""
    documents: Int64s
    """Document of each piece, as an index into the packed lengths."""
    starts: Int64s
    """Index of the first token of each piece in its document."""
    lengths: Int64s
    """Number of tokens of each piece."""
    num_rows: int


def cut(lengths: Int64s, row_length: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return document, start and length of each piece. Only documents longer than a row are cut."""
    stride = row_length - 1
    num_pieces = np.maximum(1, -(-(lengths - 1) // stride))
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first_piece[documents]) * stride
    return documents, starts, np.minimum(row_length, lengths[documents] - starts)
