import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.data.order import MAX_ROWS, UniformOrder, _mix, _round_keys, permute, rows_at

sizes = st.integers(1, 3000)
sizes_to_the_limit = st.one_of(
    st.integers(1, MAX_ROWS),
    st.builds(lambda bits, change: min(max(1, (1 << bits) + change), MAX_ROWS), st.integers(0, 40), st.integers(-1, 1)),
)
seeds = st.integers(0, 2**63 - 1)


def invert(seed: int, epoch: int, rows: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """The indices that `permute` maps to `rows`: the rounds of the network backwards."""
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    values, outside = rows.astype(np.uint64), np.ones(rows.shape, bool)
    while outside.any():
        values[outside] = decrypt(values[outside], half_bits, _round_keys(seed, epoch))
        outside = values >= np.uint64(num_rows)
    return values.astype(np.int64)


def decrypt(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys[::-1]:
        left, right = right ^ (_mix(left ^ key) & mask), left
    return (left << half_bits) | right


@given(seed=seeds, epoch=st.integers(0, 1000), num_rows=sizes)
def test_an_epoch_is_a_permutation_of_all_rows(seed: int, epoch: int, num_rows: int) -> None:
    rows = permute(seed, epoch, np.arange(num_rows), num_rows)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@given(seed=seeds, num_rows=st.integers(1, MAX_ROWS), offset=st.integers(0, MAX_ROWS))
def test_rows_stay_in_range_and_differ_for_any_size(seed: int, num_rows: int, offset: int) -> None:
    indices = np.arange(min(64, num_rows)) + offset % (num_rows - min(64, num_rows) + 1)
    rows = permute(seed, 0, indices, num_rows)
    assert 0 <= rows.min() <= rows.max() < num_rows
    assert len(set(rows.tolist())) == len(indices)


@given(
    seed=seeds, epoch=st.integers(0, 2**40), num_rows=sizes_to_the_limit, shares=st.lists(st.floats(0, 1), min_size=1, max_size=32)
)
@example(seed=0, epoch=0, num_rows=MAX_ROWS, shares=[0.0, 0.5, 1.0])
def test_every_row_stands_at_exactly_one_index_for_any_size(seed: int, epoch: int, num_rows: int, shares: list[float]) -> None:
    """A map with an inverse on both sides repeats nothing and leaves nothing out, however large it is."""
    numbers = np.array([int(share * (num_rows - 1)) for share in shares], np.int64)
    assert np.array_equal(invert(seed, epoch, permute(seed, epoch, numbers, num_rows), num_rows), numbers)
    assert np.array_equal(permute(seed, epoch, invert(seed, epoch, numbers, num_rows), num_rows), numbers)


@given(seed=seeds, num_rows=st.integers(1, 60), epochs=st.integers(1, 4))
def test_a_fresh_order_goes_on_at_every_position(seed: int, num_rows: int, epochs: int) -> None:
    whole = UniformOrder(seed, num_rows).rows_at(0, num_rows * epochs)
    for position in range(num_rows * epochs):
        rest = UniformOrder(seed, num_rows).rows_at(position, min(3, num_rows * epochs - position))
        assert rest.tolist() == whole[position : position + 3].tolist()


@pytest.mark.parametrize("num_rows", [1 << 20, MAX_ROWS - 1])
def test_memory_does_not_grow_with_the_number_of_rows(num_rows: int) -> None:
    order = UniformOrder(1, num_rows)
    tracemalloc.start()
    try:
        order.rows_at(num_rows // 2, 1024)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@given(
    seed=seeds, num_rows=st.integers(1, 200), start=st.integers(0, 1000), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12)
)
def test_the_order_does_not_depend_on_how_it_is_cut(seed: int, num_rows: int, start: int, cuts: list[int]) -> None:
    whole = rows_at(seed, start, sum(cuts), num_rows)
    pieces = [rows_at(seed, start + sum(cuts[:i]), count, num_rows) for i, count in enumerate(cuts)]
    assert np.array_equal(whole, np.concatenate(pieces))


@given(seed=seeds, num_rows=st.integers(1, 300), epochs=st.integers(1, 4))
def test_positions_run_on_across_epochs_without_repeat_or_omission(seed: int, num_rows: int, epochs: int) -> None:
    rows = rows_at(seed, 0, num_rows * epochs, num_rows).reshape(epochs, num_rows)
    assert np.array_equal(np.sort(rows, axis=1), np.tile(np.arange(num_rows), (epochs, 1)))


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [permute(seed, epoch, np.arange(1000), 1000) for seed in (1, 2) for epoch in (0, 1)]
    same = [np.mean(a == b) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(same) < 0.02


def test_neighbours_are_scattered_over_the_whole_epoch() -> None:
    rows = permute(7, 0, np.arange(100_000), 100_000)
    assert abs(np.corrcoef(np.arange(100_000), rows)[0, 1]) < 0.02
    assert 0.9 < np.abs(np.diff(rows)).mean() / (100_000 / 3) < 1.1  # what independent uniform rows would give


def test_the_order_is_the_published_one() -> None:
    """Changing the order would silently break every recorded run."""
    assert rows_at(1337, 0, 12, 10).tolist() == [2, 4, 1, 9, 3, 6, 8, 5, 0, 7, 0, 7]


@pytest.mark.parametrize("num_rows", [0, -1, MAX_ROWS + 1])
def test_a_size_out_of_range_is_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match="rows cannot be ordered; the number must be from 1 to"):
        permute(0, 0, np.array([0]), num_rows)


def test_an_index_outside_the_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="not all in an epoch, which has 0 to 9"):
        permute(0, 0, np.array([10]), 10)
    with pytest.raises(ValueError, match="not all in an epoch, which has 0 to 9"):
        permute(0, 0, np.array([-1]), 10)


@pytest.mark.parametrize("start", [0, 1000, 1023, 1024, 2049, 2499, 2500, 4999, 7490])
def test_rows_across_blocks_and_epochs_are_those_of_the_permutations(start: int) -> None:
    num_rows, count = 2500, 2100
    epochs = np.concatenate([permute(7, epoch, np.arange(num_rows), num_rows) for epoch in range(5)])
    found = rows_at(7, start, count, num_rows)
    assert found.tolist() == epochs[start : start + count].tolist()
    found[:] = -1  # the caller may change its result
    assert rows_at(7, start, count, num_rows).tolist() == epochs[start : start + count].tolist()
