"""The order of the training rows: a pure function of the seed and a position, the same for any number of ranks and workers.

Position `p` of a run belongs to epoch `p // N`. The row at index `i = p % N` of epoch `e` is `permute(seed, e, i, N)`, a keyed
permutation of 0..N-1 that needs no table. So the state of the data is one integer, the number of rows consumed.

The permutation is a balanced Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits that holds N. Cycle
walking (Black and Rogaway, 2002) restricts it to 0..N-1: a value outside this range is encrypted again until it is inside. There
are fewer than 4 N values, so the expected number of encryptions is below four.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 1 << 40
_ROUNDS = 6
_BLOCK = 1024


class RowOrder(Protocol):
    """The row at every position of a run. Positions start at 0 and have no end."""

    @property
    def description(self) -> str:
        """Return one line for the log that says how often each row is drawn."""

    def rows_at(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the rows at positions `start` to `start + count - 1`, shape (count,)."""


@dataclass(frozen=True)
class UniformOrder:
    """An order in which every row comes once in each epoch of `num_rows` positions."""

    seed: int
    num_rows: int

    @property
    def description(self) -> str:
        return f"each epoch trains on each of the {self.num_rows} rows once"

    def rows_at(self, start: int, count: int) -> NDArray[np.int64]:
        return rows_at(self.seed, start, count, self.num_rows)


def permute(seed: int, epoch: int, indices: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Return the rows at `indices` (any shape, each in 0..num_rows-1) of one epoch's permutation of 0..num_rows-1."""
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows cannot be ordered; the number must be from 1 to {MAX_ROWS}")
    if indices.size and not 0 <= indices.min() <= indices.max() < num_rows:
        raise ValueError(f"indices {indices.min()} to {indices.max()} are not all in an epoch, which has 0 to {num_rows - 1}")
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch)
    values = _encrypt(indices.astype(np.uint64), half_bits, keys)
    while (outside := values >= np.uint64(num_rows)).any():
        values[outside] = _encrypt(values[outside], half_bits, keys)
    return values.astype(np.int64)


def rows_at(seed: int, start: int, count: int, num_rows: int) -> NDArray[np.int64]:
    """Return the rows at positions `start` to `start + count - 1` of a run, shape (count,). Positions continue across epochs."""
    rows = np.empty(count, dtype=np.int64)
    for epoch in range(start // num_rows, (start + count - 1) // num_rows + 1):
        before = epoch * num_rows
        position, end = max(start, before), min(start + count, before + num_rows)
        while position < end:
            block, place = divmod(position - before, _BLOCK)
            found = _rows_of_block(seed, epoch, block, num_rows)[place : place + end - position]
            rows[position - start : position - start + len(found)] = found
            position += len(found)
    return rows


@lru_cache(maxsize=64)
def _rows_of_block(seed: int, epoch: int, block: int, num_rows: int) -> NDArray[np.int64]:
    # A call for 12 rows takes as long as one for 500, because NumPy's calls take the time.
    return permute(seed, epoch, np.arange(block * _BLOCK, min((block + 1) * _BLOCK, num_rows)), num_rows)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _encrypt(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood, 2014): each input bit affects each output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
