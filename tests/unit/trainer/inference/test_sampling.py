"""B rows, V vocabulary."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import CheckpointError
from trainer.inference.sampling import GumbelNoise, Sampling, choose_tokens, filtered_logits

LOGITS = [0.0, 3.0, 1.0, 2.0, -5.0, 1.0]
NOISE = GumbelNoise(0, [0, 1])
CHI_SQUARE_ONE_IN_A_THOUSAND = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def by_definition(logits: list[float], seen: set[int], sampling: Sampling) -> list[float]:
    """The probabilities that are sampled from, in plain Python, one filter after the other."""
    penalty = sampling.repetition_penalty
    logits = [(x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(logits)]
    weights = [float(np.exp((x - max(logits)) / sampling.temperature)) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order if sampling.top_k is None else order[: sampling.top_k]
    total = sum(weights[i] for i in kept)
    before = [0.0, *accumulate(weights[i] / total for i in kept)]
    kept = [i for i, share in zip(kept, before, strict=False) if share < sampling.top_p or sampling.top_p == 1]
    kept = [i for i in kept if weights[i] >= sampling.min_p * max(weights[i] for i in kept)]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def probabilities(logits: list[float], sampling: Sampling, seen: set[int] = frozenset()) -> Tensor:  # type: ignore[assignment]
    seen_BV = torch.tensor([[i in seen for i in range(len(logits))]])
    return filtered_logits(torch.tensor([logits]), seen_BV, sampling).softmax(1)[0]


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"repetition_penalty": 1.8},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
)
def test_frequencies_follow_the_distribution_that_the_filters_define(chosen: dict[str, Any]) -> None:
    sampling, seen, draws = Sampling(**chosen), {1, 4}, 6000
    seen_BV = torch.tensor([[i in seen for i in range(len(LOGITS))]]).expand(draws, -1)
    tokens_B = choose_tokens(torch.tensor([LOGITS]).expand(draws, -1), seen_BV, GumbelNoise(7, range(draws)), sampling)
    expected = np.array(by_definition(LOGITS, seen, sampling)) * draws
    counts = np.bincount(tokens_B, minlength=len(LOGITS))
    assert counts[expected == 0].sum() == 0
    often = expected > 5
    statistic = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert statistic < CHI_SQUARE_ONE_IN_A_THOUSAND[int(often.sum()) - 1]


@settings(max_examples=150)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=8),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 9),
    top_p=st.sampled_from([0.137, 0.611, 0.923, 1.0]),
    min_p=st.sampled_from([0.0, 0.053, 0.417, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.5]),
    seen=st.sets(st.integers(0, 7)),
)
def test_the_distribution_is_the_one_of_the_definitions(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float, penalty: float, seen: set[int]
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    expected = by_definition(logits, seen, sampling)
    torch.testing.assert_close(probabilities(logits, sampling, seen), torch.tensor(expected, dtype=torch.float64))


def test_top_k_keeps_k_tokens_also_where_logits_are_equal_and_prefers_low_ids() -> None:
    assert probabilities([1.0, 2.0, 1.0, 1.0], Sampling(top_k=3)).nonzero().flatten().tolist() == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    # shares 0.64, 0.24, 0.09, 0.03
    logits = [0.0, 3.0, 1.0, 2.0]
    assert probabilities(logits, Sampling(top_p=0.63)).nonzero().flatten().tolist() == [1]
    assert probabilities(logits, Sampling(top_p=0.65)).nonzero().flatten().tolist() == [1, 3]


def test_a_repetition_penalty_makes_a_token_that_was_there_less_likely_whatever_the_sign_of_its_logit() -> None:
    for token in range(len(LOGITS)):
        before, after = (probabilities(LOGITS, Sampling(repetition_penalty=p), {token})[token] for p in (1.0, 1.5))
        assert after < before or LOGITS[token] == 0


def test_temperature_zero_takes_the_likeliest_token_and_the_lowest_id_of_equals() -> None:
    logits_BV = torch.tensor([LOGITS, [2.0, 5.0, 5.0, 0.0, 0.0, 0.0]])
    assert choose_tokens(logits_BV, None, NOISE, Sampling(temperature=0)).tolist() == [1, 1]


def test_temperature_zero_respects_the_repetition_penalty() -> None:
    seen_BV = torch.tensor([[False, True, False, False, False, False]])
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    assert choose_tokens(torch.tensor([LOGITS]), seen_BV, NOISE, sampling).tolist() == [3]


def test_a_tiny_temperature_is_the_likeliest_token_and_no_overflow() -> None:
    assert choose_tokens(torch.tensor([LOGITS]) * 1e6, None, GumbelNoise(0, [0]), Sampling(temperature=1e-12)).tolist() == [1]


@given(row=st.integers(0, 1 << 40), logits=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=6))
def test_only_tokens_that_were_kept_are_drawn(row: int, logits: list[float]) -> None:
    sampling = Sampling(top_k=2)
    [token] = choose_tokens(torch.tensor([logits]), None, GumbelNoise(0, [row]), sampling).tolist()
    assert probabilities(logits, sampling)[token] > 0


class Extremes(GumbelNoise):
    """Draws zero, for which the noise would be infinite, for every token but the last."""

    def _exponential(self, key: Any, vocab_size: int) -> Any:
        return np.array([*[0.0] * (vocab_size - 1), 1.0])


def test_a_token_that_was_removed_is_not_drawn_by_the_highest_noise_either() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert choose_tokens(logits_BV, None, Extremes(0, [0]), Sampling(top_k=1)).tolist() == [3]
    assert Extremes(0, [0]).next(4).isfinite().all()


def by_cumulative_sums(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The usual way to draw, whose edges move with the errors of all tokens before them."""
    cumulative_BV = logits_BV.double().softmax(dim=1).cumsum(dim=1)
    return torch.searchsorted(cumulative_BV, uniform_B[:, None])[:, 0]


def test_rounding_of_the_logits_hardly_ever_changes_a_token() -> None:
    generator = torch.Generator().manual_seed(1)
    noise, same_noise, num_other = GumbelNoise(3, range(50)), GumbelNoise(3, range(50)), 0
    for _ in range(6):
        exact_BV = torch.randn(50, 50_304, generator=generator)
        rounded_BV = exact_BV + 1e-4 * torch.randn(50, 50_304, generator=generator)
        tokens_B = choose_tokens(exact_BV, None, noise, Sampling())
        assert tokens_B.equal(choose_tokens(rounded_BV, None, same_noise, Sampling()))
        uniform_B = torch.rand(50, generator=generator, dtype=torch.float64)
        num_other += int((by_cumulative_sums(exact_BV, uniform_B) != by_cumulative_sums(rounded_BV, uniform_B)).sum())
    assert num_other > 0, "the usual way does change tokens here"


@pytest.mark.parametrize("logits", [[float("nan"), 0.0], [float("inf"), 0.0], [float("-inf")] * 2])
def test_logits_that_are_no_numbers_are_refused(logits: list[float]) -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        choose_tokens(torch.tensor([[0.0, 1.0], logits]), None, NOISE, Sampling(temperature=0))


def test_a_row_has_the_same_noise_in_any_batch_and_another_one_than_its_neighbours() -> None:
    together, alone = GumbelNoise(5, range(4)), GumbelNoise(5, [2])
    first, second = together.next(3), together.next(3)
    assert first[2].equal(alone.next(3)[0])
    assert second[2].equal(alone.next(3)[0])
    assert len(set(torch.cat((first, second)).flatten().tolist())) == 24
    together.keep([3, 2])
    again = GumbelNoise(5, [3, 2])
    for _ in range(2):
        again.next(3)
    assert together.next(3).equal(again.next(3))
    assert not GumbelNoise(6, [2]).next(3)[0].equal(first[2])


def test_the_noise_of_a_token_depends_neither_on_the_size_of_the_vocabulary_nor_on_earlier_draws_of_others() -> None:
    small, large = GumbelNoise(5, [1]), GumbelNoise(5, [1])
    small.next(2)
    large.next(60_000)
    assert small.next(3).equal(large.next(60_000)[:, :3])
