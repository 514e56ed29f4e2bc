import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.documents import Reason, document_id, partition_of

words = st.integers(0, 2**32 - 1)


@given(words, words)
def test_an_id_leads_back_to_partition_and_ordinal(partition: int, ordinal: int) -> None:
    identity = document_id(partition, ordinal)
    assert (partition_of(identity), identity % 2**32) == (partition, ordinal)
    assert 0 <= identity < 2**64


@pytest.mark.parametrize(("partition", "ordinal"), [(2**32, 0), (0, 2**32), (-1, 0), (0, -1)])
def test_a_number_that_does_not_fit_is_refused(partition: int, ordinal: int) -> None:
    with pytest.raises(OverflowError, match="32 bits"):
        document_id(partition, ordinal)


def test_length_language_and_likeness_are_no_fault_of_the_input_and_broken_bytes_are() -> None:
    unwanted = {Reason.EMPTY, Reason.TOO_SHORT, Reason.TOO_LONG, Reason.LANGUAGE_UNWANTED, Reason.NEAR_DUPLICATE, Reason.OVER_SHARE}
    broken = {Reason.NOT_JSON, Reason.INVALID_UTF8, Reason.UNSAFE_MEMBER, Reason.CORRUPT_PARQUET, Reason.DECOMPRESSION_BUDGET}
    assert not any(reason.malformed for reason in unwanted)
    assert all(reason.malformed for reason in broken)


def test_a_reason_is_its_text_and_survives_pickling() -> None:
    for reason in Reason:
        assert json.loads(json.dumps({reason: reason})) == {reason.value: reason.value}
        assert Reason(reason.value) is pickle.loads(pickle.dumps(reason)) is reason
