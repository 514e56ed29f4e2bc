import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ModelConfig
from trainer.generate import Sampling, generate_tokens, sample_token
from trainer.model import build_model

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -5.0])


def draw(count: int, **settings: float | int | None) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sample_token(LOGITS, Sampling(**settings), generator) for _ in range(count)}  # type: ignore[arg-type]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draw(5, temperature=0) == {1}


@given(k=st.integers(1, 5))
def test_top_k_draws_from_the_k_likeliest_only(k: int) -> None:
    assert draw(60, top_k=k, temperature=5.0) <= set([1, 3, 2, 0, 4][:k])


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    probabilities = LOGITS.softmax(0)  # 0.64, 0.24, 0.09, 0.03, 0.0002 in order
    assert draw(300, top_p=float(probabilities[1]) - 0.01) == {1}
    assert draw(300, top_p=float(probabilities[1]) + 0.01) == {1, 3}


def test_frequencies_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[sample_token(LOGITS, Sampling(), generator)] += 1
    expected = LOGITS.softmax(0) * 4000
    kept = expected > 5
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert statistic < 16.3  # chi-square with 3 degrees of freedom exceeds this once in a thousand


def test_generation_is_repeatable_ends_at_the_limit_and_goes_on_beyond_the_context() -> None:
    model = build_model(ModelConfig(layers=1, width=16, heads=2, context=8), 40, seed=0).eval()
    first, again = ([*generate_tokens(model, [1, 5], 40, stop=2, sampling=Sampling(20, seed=3), context=8)] for _ in range(2))
    assert first == again
    assert len(first) == 20 or 2 not in first
    assert max(first) < 40  # ids of the vocabulary's padding never appear
