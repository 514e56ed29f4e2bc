"""A difference of one bit between replicas is found with tensor and rank. Equal replicas raise no error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import GuardError
from tests.support.ranks import run_ranks
from trainer.distributed.group import Group
from trainer.distributed.replica_check import ReplicaCheck, ReplicaDifference, bit_sums, find_difference

ALONE = Group(0, 1, 0, torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=draw).to(dtype) for name, shape in (("a", (7, 5)), ("b", (11,)), ("c", (1,)))}


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Flip one bit. The result may be NaN."""
    raw = tensor.view(-1).view(torch.uint8)
    raw[place % len(raw)] ^= 1 << bit


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.sampled_from("abc"), st.integers(0, 10**6), st.integers(0, 7))
@settings(max_examples=200)
def test_any_single_flipped_bit_changes_the_sum_of_its_tensor_and_no_other(
    seed: int, dtype: torch.dtype, name: str, place: int, bit: int
) -> None:
    one, other = weights(seed, dtype), weights(seed, dtype)
    assert torch.equal(bit_sums(one), bit_sums(other))
    flip(other[name], place, bit)
    assert [key for key, same in zip(one, (bit_sums(one) == bit_sums(other)).tolist(), strict=True) if not same] == [name]


@given(
    st.integers(2, 8).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(0, ranks - 1))),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.sets(st.integers(0, 2)),
)
@settings(max_examples=200)
def test_the_tensors_and_the_odd_rank_are_named_where_there_is_a_majority(
    ranks: tuple[int, int], sums: list[int], wrong: set[int]
) -> None:
    num_ranks, odd = ranks
    sums_RP = torch.tensor([sums] * num_ranks)
    for place in wrong:
        sums_RP[odd, place] ^= 1
    found = find_difference(sums_RP, ("a", "b", "c"))
    if not wrong:
        assert found is None
    else:
        expected = (odd,) if num_ranks > 2 else (0, 1)
        assert found == ReplicaDifference(tuple("abc"[place] for place in sorted(wrong)), expected)


def test_a_negative_zero_is_another_bit_pattern_than_zero_and_the_same_nan_is_equal() -> None:
    zero, nan = {"a": torch.tensor([0.0])}, {"a": torch.tensor([torch.nan])}
    assert not torch.equal(bit_sums(zero), bit_sums({"a": torch.tensor([-0.0])}))
    assert torch.equal(bit_sums(nan), bit_sums({"a": nan["a"].clone()}))


def test_what_is_not_contiguous_is_summed_all_the_same() -> None:
    whole = torch.randn(6, 4)
    assert torch.equal(bit_sums({"a": whole.t()}), bit_sums({"a": whole}))


def test_one_rank_alone_and_a_distance_of_0_compare_nothing() -> None:
    assert not ReplicaCheck(weights(0), ALONE, 5).due(5)
    two = Group(0, 2, 0, torch.device("cpu"))
    assert not ReplicaCheck(weights(0), two, 0).due(5)
    assert [step for step in range(1, 11) if ReplicaCheck(weights(0), two, 5).due(step)] == [5, 10]


def compared(group: Group, flipped_rank: int, in_step: int, lag: int) -> tuple[list[int], str]:
    """Return the steps whose comparison was read without an error, and the error."""
    parameters = weights(0)
    check = ReplicaCheck(parameters, group, every_steps=2)
    read = []
    for step in range(1, 11):
        for parameter in parameters.values():
            parameter.add_(0.125)
        if step == in_step and group.rank == flipped_rank:
            flip(parameters["b"], 13, 4)
        if check.due(step):
            check.begin(step)
        try:
            check.read(step - lag)
        except GuardError as error:
            return read, str(error)
        read.append(step - lag)
    check.forget(3)
    check.read(100)
    return read, ""


@pytest.mark.parametrize("lag", [0, 1])
def test_a_flip_on_one_of_three_ranks_is_told_on_all_at_the_next_comparison_with_rank_and_tensor(lag: int) -> None:
    for read, error in run_ranks(compared, 3, 2, 5, lag):
        assert read[-1] == 5
        assert error.startswith(
            "the weights of the ranks are no longer the same after step 6: b on rank 2; they were last equal after step 4."
        )


def test_equal_ranks_raise_no_alarm() -> None:
    assert run_ranks(compared, 2, -1, 0, 0) == [(list(range(1, 11)), "")] * 2
