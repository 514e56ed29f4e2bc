import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from data_pipeline.dataset.splits import fewest_held_out, fractions_of_keys, is_held_out, tail_offset

KEYS = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)


@given(arrays(np.uint64, st.integers(1, 20)), st.integers(0, 2**63 - 1))
def test_equal_keys_fall_on_the_same_side_wherever_they_stand(keys: np.ndarray, seed: int) -> None:
    together = is_held_out(np.concatenate([keys, keys[::-1]]), 0.5, seed)
    assert together[: len(keys)].tolist() == together[len(keys) :][::-1].tolist()
    assert together[0] == is_held_out(keys[:1], 0.5, seed)[0]


@given(arrays(np.uint64, st.integers(0, 20)), st.integers(0, 2**63 - 1))
def test_a_fraction_lies_between_0_and_1(keys: np.ndarray, seed: int) -> None:
    fractions = fractions_of_keys(keys, seed)
    assert ((fractions >= 0) & (fractions < 1)).all()


def test_the_share_held_out_is_the_one_that_was_asked_for_also_of_keys_in_a_row() -> None:
    for keys in (KEYS, np.arange(20_000, dtype=np.uint64)):
        for fraction in (0.005, 0.05, 0.5):
            expected = fraction * len(keys)
            assert abs(is_held_out(keys, fraction, 0).sum() - expected) < 5 * expected**0.5


def test_another_seed_holds_out_other_documents() -> None:
    first, second = (is_held_out(KEYS, 0.1, seed) for seed in (0, 1))
    assert (first & second).sum() < 0.2 * first.sum()


def test_a_larger_share_holds_out_the_same_documents_and_more() -> None:
    few, many = (is_held_out(KEYS, fraction, 0) for fraction in (0.05, 0.1))
    assert (few & many).sum() == few.sum() < many.sum()


def test_of_few_documents_a_tenth_is_held_out_and_never_none() -> None:
    assert [fewest_held_out(4, number) for number in (1, 2, 19, 20, 39, 40, 10**9)] == [1, 1, 1, 2, 3, 4, 4]
    assert fewest_held_out(0, 100) == 0


@given(st.integers(0, 10**12), st.floats(0.001, 0.999))
def test_the_border_lies_in_the_file(file_bytes: int, fraction: float) -> None:
    assert 0 <= tail_offset(file_bytes, fraction) <= file_bytes
