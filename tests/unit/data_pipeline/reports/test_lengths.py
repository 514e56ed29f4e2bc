from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.packing.placement import pack
from data_pipeline.reports.facts import truncation_advice
from data_pipeline.reports.lengths import compare_row_lengths, describe_lengths, log_borders

LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 10**6)), min_size=1)


def counted(lengths: list[int]) -> dict[str, int]:
    return {str(length): count for length, count in Counter(lengths).items()}


@given(LENGTHS)
def test_percentiles_are_those_of_the_sorted_lengths(lengths: list[int]) -> None:
    found = describe_lengths(counted(lengths))
    ordered = sorted(lengths)
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == ordered[-(-len(ordered) * percent // 100) - 1]
    assert found["max"] == ordered[-1]
    assert found["mean"] == round(sum(lengths) / len(lengths), 3)


@given(LENGTHS)
def test_every_document_is_in_exactly_one_bin_of_the_histogram(lengths: list[int]) -> None:
    found = describe_lengths(counted(lengths))
    assert found["documents"] == len(lengths)
    assert found["total"] == sum(lengths)
    for low, high, documents, units in found["histogram"]:
        inside = [length for length in lengths if low <= length < high]
        assert (documents, units) == (len(inside), sum(inside))
    assert sum(documents for _, _, documents, _ in found["histogram"]) == len(lengths)
    assert all(before[1] == after[0] for before, after in pairwise(found["histogram"])), "bins without gaps"


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_borders_enclose_the_range_in_at_most_forty_bins_and_no_wider_than_needed(one: int, other: int) -> None:
    low, high = sorted((one, other))
    borders = log_borders(low, high)
    assert borders[0] <= low
    assert borders[-2] <= high < borders[-1]
    assert len(borders) - 1 <= 40
    assert (np.diff(borders) > 0).all()
    powers = {1 << exponent for exponent in range(31) if borders[0] <= 1 << exponent <= borders[-1]}
    assert powers <= set(borders.tolist()), "row lengths are borders, so the table and the picture agree"


@pytest.mark.parametrize(("low", "high", "borders"), [(3, 6, [3, 4, 5, 6, 7]), (20, 33, [19, 21, 23, 25, 27, 29, 32, 35])])
def test_a_narrow_range_has_fine_bins(low: int, high: int, borders: list[int]) -> None:
    assert log_borders(low, high).tolist() == borders


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(8, 2000))
def test_the_cost_of_a_row_length_is_that_of_counting_document_by_document(lengths: list[int], row_length: int) -> None:
    for row in compare_row_lengths(counted(lengths), row_length):
        limit = row["row_length"]
        assert row["documents_cut"] == sum(length > limit for length in lengths)
        assert row["tokens_kept_if_truncated"] == sum(min(length, limit) for length in lengths)
        assert row["kept_rate"] == round(row["tokens_kept_if_truncated"] / sum(lengths), 6)
        pieces = pack(np.array(lengths), limit, "best-fit").lengths
        assert row["rows"] == len(pieces)
        assert row["padding_if_one_document_per_row"] == sum(limit - piece for piece in pieces.tolist())


@given(LENGTHS, st.integers(8, 1 << 20))
def test_candidates_are_the_set_length_and_powers_of_two_up_to_the_first_that_holds_p99(
    lengths: list[int], row_length: int
) -> None:
    found = [row["row_length"] for row in compare_row_lengths(counted(lengths), row_length)]
    powers = [length for length in found if length & (length - 1) == 0 and (length != row_length or length == 128)]
    p99 = describe_lengths(counted(lengths))["p99"]
    assert row_length in found
    assert found == sorted(set(found))
    assert min(powers) == 128
    assert max(found) >= p99
    assert len([length for length in powers if length >= max(p99, 128)]) <= 1, "none beyond the first that is enough"


def test_the_advice_says_what_the_set_length_does_and_which_is_enough() -> None:
    lengths = [100] * 90 + [300] * 9 + [5000]
    assert truncation_advice(compare_row_lengths(counted(lengths), 128), 128) == (
        "Rows of 128 tokens (as set) hold 90.0 % of the documents uncut. Truncation of the others would keep 61.6 % of all tokens. "
        "Packing cuts them and keeps all tokens. Rows of 512 would hold 99.0 % uncut and keep 73.1 % of all tokens if truncated. "
        "With one document per row, 16.6 % of all positions would be padding."
    )
    assert truncation_advice(compare_row_lengths(counted(lengths), 8192), 8192) == (
        "Rows of 8,192 tokens (as set) hold all of the documents uncut. Rows of 512 would already hold 99.0 % uncut. "
        "With one document per row, 98.0 % of all positions would be padding."
    )
    assert truncation_advice(compare_row_lengths(counted([100]), 128), 128).startswith("Rows of 128 tokens (as set) hold all")
    assert truncation_advice([], 128) == "", "a report without the table has no advice"


def test_an_empty_corpus_has_no_lengths() -> None:
    assert describe_lengths({}) == {
        "documents": 0, "total": 0, "mean": 0.0, "p50": 0, "p90": 0, "p95": 0, "p99": 0, "max": 0, "histogram": []
    }  # fmt: skip
    assert [row["cut_rate"] for row in compare_row_lengths({}, 64)] == [0.0, 0.0]
