import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.documents import Reason
from data_pipeline.quality.perplexity import MAX_SCORE, Bounds
from data_pipeline.stages.select import copies_of_documents, reasons_of, repeats_of_groups

groups = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 10**12), min_size=1)
weights = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100))


def test_a_document_is_judged_by_what_was_measured_alone() -> None:
    columns = {
        "perplexity": pa.array([9, 10, 20, 21, 15], pa.uint16()),
        "wanted": pa.array([400, 500, 1000, 0, 499], pa.uint16()),
        "tokens": pa.array([[1]] * 5, pa.large_list(pa.uint16())),
    }
    found = [
        reasons_of(pa.record_batch(columns), Bounds(*scores, probability)).tolist()
        for scores, probability in (((10, 20), 500), ((10, 20), 0), ((0, MAX_SCORE), 500), ((0, MAX_SCORE), 0))
    ]
    low, high, bad = Reason.PERPLEXITY_LOW, Reason.PERPLEXITY_HIGH, Reason.CLASSIFIED_BAD
    assert found == [[low, "", "", high, bad], [low, "", "", high, ""], [bad, "", "", bad, bad], [""] * 5]


@given(groups, weights, st.floats(1, 10))
def test_shares_are_in_proportion_to_weights_and_no_group_exceeds_max_repeats(
    tokens: dict[str, int], weight: dict[str, float], max_repeats: float
) -> None:
    repeats = repeats_of_groups(tokens, weight, max_repeats)
    taken = {group: tokens[group] * repeat for group, repeat in repeats.items()}
    assert all(repeat <= max_repeats * (1 + 1e-12) for repeat in repeats.values())
    total, total_weight = sum(taken.values()), sum(weight.get(group, 1.0) for group in taken)
    for group, count in taken.items():
        assert count / total == pytest.approx(weight.get(group, 1.0) / total_weight)
    if repeats:
        assert max(repeats.values()) == pytest.approx(max_repeats)  # as many tokens are used as the weights allow


def test_a_group_of_weight_0_is_left_out_and_others_are_not() -> None:
    assert repeats_of_groups({"a": 100, "b": 50}, {"a": 0.0}, 1.0) == {"a": 0.0, "b": 1.0}


@given(st.floats(0, 5), st.integers(0, 2**63 - 1))
def test_the_mean_number_of_copies_is_the_requested_one(repeats: float, seed: int) -> None:
    copies = copies_of_documents(np.arange(4000, dtype=np.uint64), repeats, seed)
    assert abs(copies.mean() - repeats) < 0.05
    assert set(copies.tolist()) <= {int(repeats), int(repeats) + 1}


def test_the_number_of_copies_depends_only_on_the_id() -> None:
    ids = np.arange(1000, dtype=np.uint64)
    whole = copies_of_documents(ids, 0.5, 7)
    assert copies_of_documents(ids[300:400], 0.5, 7).tolist() == whole[300:400].tolist()
    assert copies_of_documents(ids, 0.5, 8).tolist() != whole.tolist()
