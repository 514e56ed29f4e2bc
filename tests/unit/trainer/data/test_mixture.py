import tracemalloc
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.errors import ConfigError
from data_pipeline.dataset.manifest import Manifest, ShardEntry
from data_pipeline.dataset.shards import Rows
from trainer.data.mixture import MAX_CYCLE, MixedOrder, build_order, chairman_assignment, cycle_counts
from trainer.data.order import UniformOrder

SOURCES = ("code", "prose", "notes", "empty")
SHARDS = (("code", 5), ("prose", 3), ("prose", 4), ("code", 2), ("notes", 6))
"""The rows of `code` lie in two places."""

seeds = st.integers(0, 2**63 - 1)
starts = st.one_of(st.integers(0, 500), st.integers(0, 10**12))
weightings = st.dictionaries(st.sampled_from(["code", "prose", "notes"]), st.integers(1, 20).map(lambda n: n / 20), min_size=1)


def rows_of(*shards: tuple[str, int]) -> Rows:
    """Rows of (source, number) by shard; their files are never read."""
    entries = tuple(ShardEntry(f"{n}.arrow", "train", source, count, 0, 0, 0, "") for n, (source, count) in enumerate(shards))
    return Rows(Path(), Manifest("", 8, 100, "uint16", "byte", "", SOURCES, entries, {}, (), (), {}, {}), "train")


def mixed(seed: int, weights: Mapping[str, float]) -> MixedOrder:
    order = build_order(seed, rows_of(*SHARDS), SOURCES, weights)
    assert isinstance(order, MixedOrder)
    return order


def excess(source_M: NDArray[np.uint16], counts: list[int], source: int) -> NDArray[np.int64]:
    """How many rows more than its share a source has had after 0, 1, … places of a cycle, times the length of the cycle."""
    return np.concatenate([[0], np.cumsum((source_M == source) * len(source_M) - counts[source])])


@given(counts=st.lists(st.integers(1, 60), min_size=2, max_size=8))
@example(counts=[1] * 40)
@example(counts=[60_000, 5_535, 1])
def test_every_beginning_holds_each_share_to_less_than_one_row(counts: list[int]) -> None:
    source_M, tolerance = chairman_assignment(counts), 1 - Fraction(1, 2 * len(counts) - 2)
    assert len(source_M) == sum(counts)
    for source in range(len(counts)):
        over = excess(source_M, counts, source)
        assert over[-1] == 0  # so the next cycle begins where this one did
        assert np.abs(over).max() <= tolerance * len(source_M)


@given(counts=st.lists(st.integers(1, 400), min_size=2, max_size=2))
def test_any_window_over_two_sources_holds_each_share_to_one_row(counts: list[int]) -> None:
    over = excess(chairman_assignment(counts), counts, 0)
    assert over.max() - over.min() <= sum(counts)  # the difference of two beginnings, in any two cycles, is a window


@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=5), start=st.integers(0, 100), length=st.integers(0, 200))
def test_any_window_over_more_sources_holds_each_share_to_two_rows(counts: list[int], start: int, length: int) -> None:
    cycle = sum(counts)
    window = np.tile(chairman_assignment(counts), (start + length) // cycle + 1)[start : start + length]
    for source, count in enumerate(counts):
        assert abs(int((window == source).sum()) * cycle - length * count) < 2 * cycle


@given(weights=st.lists(st.one_of(st.floats(1e-9, 1e9), st.integers(1, 9).map(float)), min_size=1, max_size=20))
@example(weights=[1.0] * 19 + [1e-300])
def test_a_cycle_holds_every_source_and_each_large_share_to_less_than_one_place(weights: list[float]) -> None:
    counts = cycle_counts(weights)
    assert sum(counts) <= MAX_CYCLE
    assert min(counts) >= 1
    total = sum(map(Fraction, weights))
    num_small = sum(Fraction(weight) / total * MAX_CYCLE < 1 for weight in weights)
    for count, weight in zip(counts, weights, strict=True):
        if (wanted := Fraction(weight) / total * sum(counts)) >= 1 and not num_small:
            assert abs(count - wanted) < 1 + 1e-6


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([3.0, 3.0], [1, 1]),
        ([0.333, 0.333, 0.334], [333, 333, 334]),
        ([5.0], [1]),
        ([1.0, 1e-9], [MAX_CYCLE - 1, 1]),
        ([1.0, 1e-9, 1e-9, 2.0], [21_845, 1, 1, 43_689]),
        ([1 / 3, 1 / 6], [43_691, 21_845]),
    ],
)
def test_shares_that_a_cycle_can_hold_are_kept_exactly_and_others_are_rounded(weights: list[float], counts: list[int]) -> None:
    assert cycle_counts(weights) == counts


@given(seed=seeds, weights=weightings, start=starts, count=st.integers(1, 300))
@example(seed=1, weights={"code": 7.0266, "notes": 1.5425, "prose": 4.3678}, start=65_400, count=300)
def test_a_source_has_all_its_rows_once_before_any_comes_again(
    seed: int, weights: dict[str, float], start: int, count: int
) -> None:
    order, rows = mixed(seed, weights), rows_of(*SHARDS)
    taken, all_sources = order.rows_at(start, count), rows.source_ids(np.arange(len(rows)))
    sources = rows.source_ids(taken)
    assert set(order.names) == set(weights)
    for number, name in enumerate(order.names):
        own = np.flatnonzero(all_sources == SOURCES.index(name))
        cycles, place = divmod(start, len(order.source_M))
        drawn = cycles * int(order.counts_K[number]) + int((order.source_M[:place] == number).sum())
        here = taken[sources == SOURCES.index(name)]
        epochs = (drawn + np.arange(len(here))) // len(own)
        for epoch in np.unique(epochs):
            together = here[epochs == epoch].tolist()
            assert len(set(together)) == len(together)
            assert set(together) <= set(own.tolist())


@given(seed=seeds, weights=weightings, start=starts, count=st.integers(0, 300))
def test_rows_come_from_the_sources_of_the_cycle(seed: int, weights: dict[str, float], start: int, count: int) -> None:
    order, rows = mixed(seed, weights), rows_of(*SHARDS)
    found = [SOURCES[source] for source in rows.source_ids(order.rows_at(start, count))]
    assert found == [order.names[order.source_M[p % len(order.source_M)]] for p in range(start, start + count)]


@given(seed=seeds, weights=weightings, start=starts, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_the_mixture_does_not_depend_on_how_it_is_cut(seed: int, weights: dict[str, float], start: int, cuts: list[int]) -> None:
    order = mixed(seed, weights)
    pieces = [order.rows_at(start + sum(cuts[:i]), count) for i, count in enumerate(cuts)]
    assert order.rows_at(start, sum(cuts)).tolist() == np.concatenate(pieces).tolist()


def test_a_fresh_mixture_goes_on_at_every_position() -> None:
    weights = {"code": 0.5, "notes": 0.3, "prose": 0.2}
    whole = mixed(3, weights).rows_at(0, 64).tolist()
    assert [int(mixed(3, weights).rows_at(position, 1)[0]) for position in range(64)] == whole


def test_the_mixture_is_the_published_one() -> None:
    """Changing it would silently break every recorded run."""
    assert mixed(1337, {"code": 0.5, "prose": 0.3, "notes": 0.2}).rows_at(0, 12).tolist() == [
        13,
        10,
        3,
        16,
        12,
        11,
        1,
        18,
        0,
        5,
        2,
        6,
    ]


def test_seeds_and_sources_of_one_size_have_different_orders() -> None:
    def orders(seed: int) -> list[list[int]]:
        order = build_order(seed, rows_of(("code", 50), ("prose", 50)), SOURCES, {"code": 1, "prose": 1})
        taken = order.rows_at(0, 100)
        return [taken[taken < 50].tolist(), (taken[taken >= 50] - 50).tolist()]

    several = [*orders(1), *orders(2)]
    assert all(a != b for number, a in enumerate(several) for b in several[:number])


def test_without_weights_all_rows_are_alike() -> None:
    assert build_order(7, rows_of(*SHARDS), SOURCES, {}) == UniformOrder(7, 20)


def test_the_order_says_what_is_drawn_and_what_is_left_out() -> None:
    order = mixed(0, {"prose": 3, "code": 1})
    assert order.left_out == ("notes",)
    assert order.shares == {"code": Fraction(1, 4), "prose": Fraction(3, 4)}
    assert order.description == "rows from code 25 %, prose 75 %; nothing from notes, which mixture.weights does not name"


def test_a_source_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"names poems, but .* has the sources code, prose, notes, empty; use"):
        mixed(0, {"poems": 1, "code": 1})


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="names empty, of which the prepared data has no training rows"):
        mixed(0, {"empty": 1, "code": 1})


def test_more_sources_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="65537 sources; at most 65536"):
        cycle_counts([1.0] * (MAX_CYCLE + 1))


def test_memory_does_not_grow_with_the_number_of_rows() -> None:
    tracemalloc.start()
    try:
        rows = rows_of(("code", 1 << 39), ("prose", 1 << 38), ("code", 1 << 38))
        build_order(1, rows, SOURCES, {"code": 1 / 3, "prose": 1}).rows_at(1 << 40, 1024)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
