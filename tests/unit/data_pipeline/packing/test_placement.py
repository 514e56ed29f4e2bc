import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.packing.placement import Packing, count_packing, pack

METHODS = ("best-fit", "greedy", "one-per-row")

document_lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 200)), max_size=80).map(lambda n: np.array(n, np.int64))
row_lengths = st.integers(2, 40)
methods = st.sampled_from(METHODS)


def long_tailed(num_documents: int = 3000) -> np.ndarray:
    """Return lengths like those of web text: a median of a few hundred tokens, and a few of many thousand."""
    return np.maximum(2, np.exp(np.random.default_rng(0).normal(6, 1.3, num_documents))).astype(np.int64)


def cut_rate(packing: Packing) -> float:
    return float((np.bincount(packing.documents) > 1).mean())


def fill_rate(packing: Packing, row_length: int) -> float:
    return float(packing.lengths.sum() / (packing.num_rows * row_length))


@given(document_lengths, row_lengths, methods)
def test_every_token_stands_in_the_rows_once_and_the_last_of_a_cut_piece_twice(
    lengths: np.ndarray, row_length: int, method: str
) -> None:
    packing = pack(lengths, row_length, method)
    for document, length in enumerate(lengths.tolist()):
        pieces = sorted(
            (start, start + count)
            for start, count in zip(
                packing.starts[packing.documents == document].tolist(),
                packing.lengths[packing.documents == document].tolist(),
                strict=True,
            )
        )
        assert pieces[0][0] == 0
        assert pieces[-1][1] == length
        assert all(before[1] == after[0] + 1 for before, after in itertools.pairwise(pieces))


@given(document_lengths, row_lengths, methods)
def test_every_token_but_the_first_of_a_document_is_a_target_once(lengths: np.ndarray, row_length: int, method: str) -> None:
    packing = pack(lengths, row_length, method)
    assert (packing.lengths - 1).sum() == (lengths - 1).sum()


@given(document_lengths, row_lengths, methods)
def test_no_row_is_overfull_or_empty_and_pieces_stand_in_order(lengths: np.ndarray, row_length: int, method: str) -> None:
    packing = pack(lengths, row_length, method)
    filled = np.bincount(packing.rows, packing.lengths, packing.num_rows)
    assert (filled <= row_length).all()
    assert (filled > 0).all()
    assert (np.diff(packing.rows) >= 0).all()


@given(document_lengths, row_lengths)
def test_best_fit_cuts_only_documents_longer_than_a_row(lengths: np.ndarray, row_length: int) -> None:
    packing = pack(lengths, row_length, "best-fit")
    pieces = np.bincount(packing.documents, minlength=len(lengths))
    assert ((pieces > 1) == (lengths > row_length)).all()


@given(document_lengths, row_lengths)
def test_best_fit_is_that_of_the_textbook(lengths: np.ndarray, row_length: int) -> None:
    packing = pack(lengths, row_length, "best-fit")
    rooms: list[int] = []
    for size in sorted(packing.lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(row_length - size)
    filled = np.bincount(packing.rows, packing.lengths, packing.num_rows).astype(int)
    assert sorted(row_length - filled) == sorted(rooms)


@given(document_lengths, row_lengths)
def test_greedy_leaves_at_most_one_place_free_in_every_row_but_the_last(lengths: np.ndarray, row_length: int) -> None:
    packing = pack(lengths, row_length, "greedy")
    filled = np.bincount(packing.rows, packing.lengths, packing.num_rows)
    assert (filled[:-1] >= row_length - 1).all()


def test_rows_keep_the_order_of_the_input_as_far_as_packing_allows() -> None:
    packing = pack(np.array([3, 10, 4, 10, 6]), 10, "best-fit")
    assert packing.documents.tolist() == [0, 1, 2, 4, 3]


def test_best_fit_fills_rows_of_long_tailed_text_and_cuts_fewer_documents_than_greedy() -> None:
    best_fit, greedy = (pack(long_tailed(), 2048, method) for method in ("best-fit", "greedy"))
    assert fill_rate(best_fit, 2048) > 0.999
    assert cut_rate(best_fit) < 0.5 * cut_rate(greedy)


@pytest.mark.parametrize("method", METHODS)
def test_no_documents_make_no_rows(method: str) -> None:
    assert pack(np.array([], np.int64), 8, method).num_rows == 0


@given(document_lengths, row_lengths)
def test_one_per_row_puts_every_piece_into_a_row_of_its_own(lengths: np.ndarray, row_length: int) -> None:
    packing = pack(lengths, row_length, "one-per-row")
    assert packing.rows.tolist() == list(range(packing.num_rows))
    assert (packing.starts == 0).sum() == len(lengths)


@given(document_lengths, row_lengths, methods)
def test_counting_gives_what_packing_gives(lengths: np.ndarray, row_length: int, method: str) -> None:
    packing = pack(lengths, row_length, method)
    assert count_packing(packing) == {
        "rows": packing.num_rows,
        "cut_documents": int((np.bincount(packing.documents) > 1).sum()),
        "tokens": int(packing.lengths.sum()),
    }
