"""An order that draws rows from several sources in given shares. The row at a position is a pure function of the position.

The positions are cut into equal cycles. In a cycle every source has a whole number of places, and Tijdeman's chairman assignment
(The chairman assignment problem, Discrete Mathematics 32, 1980) spreads them: of K sources, one with the share w is drawn n * w
times among the first n positions, with an error of at most 1 - 1/(2K - 2). A window is the difference of two such beginnings, so it
holds the share with an error of at most 2 - 1/(K - 1) rows, which is one row for two sources.

The k-th row drawn from a source is the row at position k of the source's `UniformOrder`, so no row of a source repeats before all
its rows have been drawn. Memory holds one cycle and the ranges of rows of each source, never the rows.

    M positions of a cycle   K sources that have a weight
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from data_pipeline.dataset.shards import Rows
from trainer.data.order import RowOrder, UniformOrder

MAX_CYCLE = 65_536


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
