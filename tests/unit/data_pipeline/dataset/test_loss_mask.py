from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.loss_mask import LossMask

sequences = st.lists(st.lists(st.booleans(), max_size=12), max_size=8)


def mask_of(values: list[list[bool]]) -> tuple[LossMask, np.ndarray]:
    sizes = np.array([len(one) for one in values], np.int64)
    return LossMask.of(np.array([value for one in values for value in one], np.bool_), sizes), sizes


@given(sequences)
def test_a_mask_gives_back_the_value_of_each_token(values: list[list[bool]]) -> None:
    mask, sizes = mask_of(values)
    mask.check(sizes)
    assert mask.has_loss(sizes).tolist() == [value for one in values for value in one]


@given(sequences)
def test_only_a_sequence_with_a_token_without_loss_has_runs_and_they_alternate(values: list[list[bool]]) -> None:
    mask, _ = mask_of(values)
    assert (mask.num_runs_B > 0).tolist() == [False in one for one in values]
    for one, runs in zip(values, np.split(mask.runs_N, np.cumsum(mask.num_runs_B))[:-1], strict=True):
        changes = sum(before != after for before, after in pairwise(one))
        assert len(runs) == ((changes + 1 + one[0]) if False in one else 0)


@given(st.lists(st.lists(st.lists(st.booleans(), max_size=6), max_size=5), max_size=5))
def test_targets_are_tokens_with_a_loss_except_the_first_of_a_segment(rows: list[list[list[bool]]]) -> None:
    mask, _ = mask_of([[value for segment in row for value in segment] for row in rows])
    segments = np.array([len(segment) for row in rows for segment in row], np.uint32)
    expected = [sum(segment[1:]) for row in rows for segment in row]
    assert mask.num_targets(segments, np.array([len(row) for row in rows], np.int64)).tolist() == expected


def test_long_prompts_take_no_more_memory_than_short_ones() -> None:
    mask, _ = mask_of([[False] * 100_000 + [True] * 5])
    assert mask.runs_N.tolist() == [100_000, 5]


@pytest.mark.parametrize(("runs", "size"), [([1, 2], 4), ([2, 0, 1], 3), ([0, 0], 0)])
def test_runs_that_do_not_fit_or_are_empty_are_refused(runs: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="a loss mask"):
        LossMask(np.array(runs, np.uint32), np.array([len(runs)])).check(np.array([size]))


def test_a_mask_of_whole_sequences_has_no_runs() -> None:
    mask, sizes = mask_of([[True, True], [], [True]])
    assert mask.has_loss(sizes).tolist() == [True] * 3
    assert mask.num_runs_B.tolist() == [0, 0, 0]
