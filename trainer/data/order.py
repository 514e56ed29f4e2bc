"""The order of the training rows: a pure function of the seed and a position, the same for any number of ranks and workers.

Position `p` of a run belongs to epoch `p // N`. The row at index `i = p % N` of epoch `e` is `permute(seed, e, i, N)`, a keyed
permutation of 0..N-1 that needs no table. So the state of the data is one integer, the number of rows consumed.

The permutation is a balanced Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits that holds N. Cycle
walking (Black and Rogaway, 2002) restricts it to 0..N-1: a value outside this range is encrypted again until it is inside. There
are fewer than 4 N values, so the expected number of encryptions is below four.

`MixedOrder` draws rows from several sources in given shares. The positions are cut into equal cycles. In a cycle every source has a
whole number of places, and Tijdeman's chairman assignment (The chairman assignment problem, Discrete Mathematics 32, 1980) spreads
them: of K sources, one with the share w is drawn n * w times among the first n positions, with an error of at most 1 - 1/(2K - 2).
A window is the difference of two such beginnings, so it holds the share with an error of at most 2 - 1/(K - 1) rows, which is one
row for two sources. The k-th row drawn from a source is the row at position k of the source's `UniformOrder`, so no row of a source
repeats before all its rows have been drawn. Memory holds one cycle and the ranges of rows of each source, never the rows.

    M positions of a cycle   K sources that have a weight
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from data_pipeline.dataset.shards import Rows

MAX_ROWS = 1 << 40
_ROUNDS = 6
_BLOCK = 1024
MAX_CYCLE = 65_536


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


@dataclass(frozen=True)
class SourceOrder:
    order: UniformOrder
    firsts: NDArray[np.int64]  # first row of each range of rows of the source
    ends: NDArray[np.int64]  # number of rows of the source up to the end of each range

    def rows_at(self, start: int, count: int) -> NDArray[np.int64]:
        numbers = self.order.rows_at(start, count)
        ranges = np.searchsorted(self.ends, numbers, side="right")
        before = np.concatenate(([0], self.ends))[ranges]
        return self.firsts[ranges] + (numbers - before)


@dataclass(frozen=True, eq=False)
class MixedOrder:
    """An order in which every source has its share of the positions, and every row of a source comes once in each pass over it.

    An epoch of the run is still as many positions as there are rows. A pass over a source may end before or after it.
    """

    names: tuple[str, ...]
    sources: tuple[SourceOrder, ...]
    left_out: tuple[str, ...]  # sources that have rows but no weight. None of their rows is drawn.
    source_M: NDArray[np.uint16]  # source that is drawn at each place of a cycle
    drawn_M: NDArray[np.int32]  # number of times that the source was drawn earlier in the cycle
    counts_K: NDArray[np.int64]  # number of places of each source in a cycle

    @property
    def shares(self) -> dict[str, Fraction]:
        return {name: Fraction(int(count), len(self.source_M)) for name, count in zip(self.names, self.counts_K, strict=True)}

    @property
    def description(self) -> str:
        drawn = ", ".join(f"{name} {float(100 * share):.4g} %" for name, share in self.shares.items())
        none = f"; nothing from {', '.join(self.left_out)}, which mixture.weights does not name" if self.left_out else ""
        return f"rows from {drawn}{none}"

    def rows_at(self, start: int, count: int) -> NDArray[np.int64]:
        cycles, places = np.divmod(np.arange(start, start + count, dtype=np.int64), len(self.source_M))
        sources, drawn = self.source_M[places], self.drawn_M[places]
        rows = np.empty(count, dtype=np.int64)
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            first_draw = int(cycles[here[0]]) * int(self.counts_K[source]) + int(drawn[here[0]])
            rows[here] = self.sources[source].rows_at(first_draw, len(here))
        return rows


def build_order(seed: int, rows: Rows, sources: Sequence[str], weights: Mapping[str, float]) -> RowOrder:
    """Return the order of a run: uniform over all rows without weights, else by source. A source without a weight is not drawn."""
    if not weights:
        return UniformOrder(seed, len(rows))
    ranges = {name: found for name, found in zip(sources, rows.source_ranges(), strict=True) if len(found)}
    _check_names(sources, ranges, weights)
    names, orders = tuple(name for name in ranges if name in weights), []
    for name in names:
        firsts_ends = ranges[name]
        ends = np.cumsum(firsts_ends[:, 1] - firsts_ends[:, 0])
        digest = hashlib.blake2b(f"mixture/{seed}/{name}".encode(), digest_size=8).digest()
        orders.append(SourceOrder(UniformOrder(int.from_bytes(digest, "little"), int(ends[-1])), firsts_ends[:, 0], ends))
    counts = cycle_counts([weights[name] for name in names])
    source_M = chairman_assignment(counts)
    drawn_M = np.empty(len(source_M), np.int32)
    for source in range(len(names)):
        here = np.flatnonzero(source_M == source)
        drawn_M[here] = np.arange(len(here))
    return MixedOrder(
        names,
        tuple(orders),
        tuple(name for name in ranges if name not in weights),
        source_M,
        drawn_M,
        np.array(counts, np.int64),
    )


def cycle_counts(weights: Sequence[float]) -> list[int]:
    """Return the number of places of each source in a cycle. Their sum is the length of the cycle, at most `MAX_CYCLE`.

    Weights count as the decimal fractions that the user wrote. If a cycle of at most `MAX_CYCLE` places keeps their shares exactly,
    the result is the shortest such cycle. Otherwise the cycle has `MAX_CYCLE` places: each source whose share is below one place
    gets one place, and the others share the remaining places by the method of largest remainders.
    """
    if len(weights) > MAX_CYCLE:
        raise ConfigError(f"mixture.weights has {len(weights)} sources; at most {MAX_CYCLE} can be mixed")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    if (cycle := math.lcm(*(share.denominator for share in shares))) <= MAX_CYCLE:
        return [int(share * cycle) for share in shares]
    return _rounded(exact)


def chairman_assignment(counts: Sequence[int]) -> NDArray[np.uint16]:
    """Return the source at each place of a cycle in which source s has `counts[s]` places, shape (M,), spread evenly.

    With K sources and the tolerance D = 1 - 1/(2K - 2), the first place n for the j-th draw of a source with share w is the first n
    with j - n * w <= D, and the last place is the last n with (n - 1) * w - (j - 1) <= D. Of the sources that have reached their
    first place, the one with the earliest last place is drawn. By Tijdeman's theorem it is never drawn after its last place.
    """
    cycle, parts = sum(counts), max(1, 2 * len(counts) - 2)

    def first_place(source: int) -> int:
        return -(-(drawn[source] * parts + 1) * cycle // (parts * counts[source])) - 1

    def last_place(source: int) -> int:
        return ((drawn[source] + 1) * parts - 1) * cycle // (parts * counts[source])

    drawn = [0] * len(counts)
    waiting = [(first_place(source), source) for source in range(len(counts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    assigned_M = np.empty(cycle, np.uint16)
    for place in range(cycle):
        while waiting and waiting[0][0] <= place:
            _, source = heapq.heappop(waiting)
            heapq.heappush(ready, (last_place(source), source))
        _, source = heapq.heappop(ready)
        assigned_M[place] = source
        drawn[source] += 1
        if drawn[source] < counts[source]:
            heapq.heappush(waiting, (first_place(source), source))
    return assigned_M


def _rounded(weights: Sequence[Fraction]) -> list[int]:
    """Return counts of at least 1 that sum to `MAX_CYCLE`, close to the shares of these weights."""
    small: set[int] = set()
    while True:
        total = sum(weight for source, weight in enumerate(weights) if source not in small)
        quotas = [weight * (MAX_CYCLE - len(small)) / total for weight in weights]
        smaller = {source for source, quota in enumerate(quotas) if source not in small and quota < 1}
        if not smaller:
            break
        small |= smaller
    counts = [1 if source in small else int(quota) for source, quota in enumerate(quotas)]
    others = [source for source in range(len(weights)) if source not in small]
    others.sort(key=lambda source: quotas[source] - counts[source], reverse=True)
    for source in others[: MAX_CYCLE - sum(counts)]:
        counts[source] += 1
    return counts


def _check_names(sources: Sequence[str], ranges: Mapping[str, object], weights: Mapping[str, float]) -> None:
    unknown = [name for name in weights if name not in sources]
    if unknown:
        raise ConfigError(
            f"mixture.weights names {', '.join(unknown)}, but the prepared data has the sources {', '.join(sources)}; "
            "use these names, or prepare again with the source"
        )
    empty = [name for name in weights if name not in ranges]
    if empty:
        raise ConfigError(
            f"mixture.weights names {', '.join(empty)}, of which the prepared data has no training rows; "
            "remove the weight, or prepare again with more text"
        )
