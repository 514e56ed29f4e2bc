from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.runs import tiny_config
from trainer.inference.likelihood import Likelihood, ScoredWindow, cut_windows, num_common, score_windows
from trainer.model.attention import Layout, make_layout
from trainer.model.decoder import Decoder, build_model

VOCAB, CONTEXT = 50, 8
CONFIG = tiny_config(Path("data"), Path("run"), model={"context": CONTEXT})
MODEL = build_model(CONFIG.model, VOCAB, 0).eval()

tokens = st.integers(0, VOCAB - 1)


def plain(window: ScoredWindow, *, all_logits: bool = False) -> Likelihood:
    """By its definition: a pass over the window alone, and the logarithm of the softmax at each scored place."""
    tokens_1L = torch.tensor([window.tokens])
    layout = make_layout(torch.zeros_like(tokens_1L), torch.arange(tokens_1L.shape[1])[None])
    first = len(window.tokens) - len(window.targets)
    with torch.no_grad():
        logits_SV = MODEL(tokens_1L, layout)[0, first:] if all_logits else MODEL.lm_head(MODEL.hidden(tokens_1L, layout)[0, first:])
        log_p_SV = logits_SV.log_softmax(dim=1)
    nats = [-log_p_SV[place, target].item() for place, target in enumerate(window.targets)]
    return Likelihood(math.fsum(nats), log_p_SV[:, :VOCAB].argmax(dim=1).tolist() == list(window.targets))


def random_windows(count: int) -> list[ScoredWindow]:
    generator = torch.Generator().manual_seed(0)
    windows = []
    for number in range(count):
        length = 1 + int(torch.randint(CONTEXT, (), generator=generator))
        drawn = torch.randint(VOCAB, (length + 1,), generator=generator).tolist()
        scored = 1 + number % length
        windows.append(ScoredWindow(tuple(drawn[:-1]), tuple(drawn[-scored:])))
    return windows


@given(st.lists(tokens), st.lists(tokens), st.lists(tokens))
def test_what_two_rows_have_in_common_ends_where_they_differ(start: list[int], one: list[int], other: list[int]) -> None:
    size = num_common([*start, *one], [*start, *other])
    assert size >= len(start)
    assert [*start, *one][:size] == [*start, *other][:size]
    assert size in (len(start) + len(one), len(start) + len(other)) or one[size - len(start)] != other[size - len(start)]


def test_one_window_at_a_time_has_the_bits_of_a_plain_computation() -> None:
    windows = random_windows(12)
    alone = [plain(window) for window in windows]
    assert score_windows(MODEL, windows, VOCAB, CONFIG, 1) == alone
    assert [its.nats for its in alone] == pytest.approx([plain(window, all_logits=True).nats for window in windows], rel=1e-6)


@pytest.mark.parametrize("batch_size", [2, 5, 100])
def test_a_batch_gives_the_same_in_the_order_of_the_windows(batch_size: int) -> None:
    windows = random_windows(12)
    together, alone = score_windows(MODEL, windows, VOCAB, CONFIG, batch_size), [plain(window) for window in windows]
    assert [its.nats for its in together] == pytest.approx([its.nats for its in alone], rel=1e-5)
    assert [its.is_greedy for its in together] == [its.is_greedy for its in alone]


def test_what_the_model_would_write_is_greedy_and_anything_else_is_not() -> None:
    start = (3, 1, 4)
    written: tuple[int, ...] = ()
    for _ in range(4):
        choices = [ScoredWindow((*start, *written), (number,)) for number in range(VOCAB)]
        [best] = [number for number, its in enumerate(score_windows(MODEL, choices, VOCAB, CONFIG, 8)) if its.is_greedy]
        written = (*written, best)
    [whole, other] = score_windows(
        MODEL,
        [
            ScoredWindow((*start, *written[:-1]), written),
            ScoredWindow((*start, *written[:-1]), (*written[:-1], (written[-1] + 1) % VOCAB)),
        ],
        VOCAB,
        CONFIG,
        2,
    )
    assert whole.is_greedy
    assert not other.is_greedy


def test_a_model_that_gives_logits_alone_is_scored_too() -> None:
    class Wrapped(nn.Module):
        def __init__(self, decoder: Decoder) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
            return self.decoder(tokens_BL, layout)

    windows = random_windows(6)
    wrapped = [its.nats for its in score_windows(Wrapped(MODEL), windows, VOCAB, CONFIG, 1)]
    assert wrapped == pytest.approx([plain(window).nats for window in windows], rel=1e-6)


@given(before=st.lists(tokens, min_size=1, max_size=20), scored=st.lists(tokens, max_size=40), context=st.integers(1, 12))
def test_every_scored_token_is_a_target_once_and_windows_are_no_longer_than_the_context(
    before: list[int], scored: list[int], context: int
) -> None:
    windows = cut_windows(before, scored, context)
    assert [target for window in windows for target in window.targets] == scored
    whole, done = [*before, *scored], len(before)
    for window in windows:
        done += len(window.targets)
        assert len(window.targets) <= len(window.tokens) <= context
        assert list(window.tokens) == whole[max(0, done - 1 - context) : done - 1]


def test_windows_are_those_of_the_harness() -> None:
    """The example in the documentation of `LM.loglikelihood_rolling`, with -1 for the prefix."""
    assert cut_windows([-1], list(range(10)), 4) == [
        ScoredWindow((-1, 0, 1, 2), (0, 1, 2, 3)),
        ScoredWindow((3, 4, 5, 6), (4, 5, 6, 7)),
        ScoredWindow((5, 6, 7, 8), (8, 9)),
    ]


def test_a_long_context_is_cut_off_from_the_left() -> None:
    assert cut_windows(list(range(10)), [10, 11], 4) == [ScoredWindow((7, 8, 9, 10), (10, 11))]
    assert cut_windows([1, 2], [], 4) == []
