"""Sampling against the plain truth: every segmentation written out, and the encoding without chance."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import SentencePieceTokenizer
from data_pipeline.tokenizer.sentence_pieces import sample_bpe, sample_unigram
from data_pipeline.tokenizer.training import train_tokenizer
from tests.support.corpora import sentences

ROOT = Path(__file__).resolve().parents[4]
PIECES = {"a": -1.0, "b": -1.5, "ab": -1.2, "aba": -2.5, "ba": -2.0, "▁": -3.0, "▁a": -1.8}


@cache
def trained(kind: Literal["bpe", "unigram"]) -> SentencePieceTokenizer:
    tokenizer = train_tokenizer(sentences(1, 200), TokenizerConfig(kind=kind, vocab_size=450))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


TEXTS = st.one_of(
    st.text(st.sampled_from("bdfgklmnaeioué ▁\n\t日😀"), max_size=60),
    st.lists(st.sampled_from(" ".join(sentences(1, 3)).split(" ")), max_size=12).map(" ".join),
)


@given(TEXTS)
def test_byte_pairs_without_chance_are_the_encoding(text: str) -> None:
    assert trained("bpe").sample(text, 0.0, 1).tolist() == trained("bpe").encode(text)


@given(TEXTS, st.integers(0, 2**31), st.sampled_from([0.05, 0.3, 0.9]))
def test_the_text_comes_back_whatever_was_drawn(text: str, seed: int, alpha: float) -> None:
    for tokenizer in (trained("bpe"), trained("unigram")):
        assert tokenizer.decode(tokenizer.sample(text, alpha, seed).tolist()) == text


def test_without_joins_every_character_stands_alone() -> None:
    assert sample_bpe("▁aba▁ab", PIECES, 1.0, random.Random(0).random) == list("▁aba▁ab")


def test_the_share_of_joins_that_is_left_out_is_alpha() -> None:
    draws = random.Random(0).random
    joined = Counter(len(sample_bpe("ab", PIECES, 0.3, draws)) for _ in range(20_000))
    assert joined[2] / 20_000 == pytest.approx(0.3, abs=0.02)


def segmentations(word: str) -> Iterator[tuple[str, ...]]:
    if not word:
        yield ()
    for end in range(1, len(word) + 1):
        if word[:end] in PIECES:
            yield from ((word[:end], *rest) for rest in segmentations(word[end:]))


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_segmentations_come_as_often_as_their_probability_says(alpha: float) -> None:
    weights = {pieces: math.exp(alpha * sum(map(PIECES.__getitem__, pieces))) for pieces in segmentations("▁abab")}
    draws = random.Random(0).random
    drawn = Counter(tuple(sample_unigram("▁abab", PIECES, alpha, draws)) for _ in range(20_000))
    assert drawn.keys() == weights.keys()
    for pieces, weight in weights.items():
        assert drawn[pieces] / 20_000 == pytest.approx(weight / sum(weights.values()), abs=0.02)


def test_a_character_without_a_piece_stands_alone() -> None:
    draw = random.Random(0).random
    assert sample_unigram("▁x", PIECES, 1.0, draw) == ["▁", "x"]
    assert sample_bpe("▁x▁a", PIECES, 0.0, draw) == ["▁", "x", "▁a"]


def drawn() -> list[list[int]]:
    return [trained(kind).sample(sentences(7, 1)[0], 0.3, 5).tolist() for kind in ("bpe", "unigram")]


def test_every_process_draws_the_same() -> None:
    code = "from tests.unit.data_pipeline.tokenizer.test_subword_sampling import drawn; print(drawn())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(drawn())
