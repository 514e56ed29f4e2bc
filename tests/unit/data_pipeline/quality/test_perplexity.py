import inspect
import json
import math
import random
import tempfile
from collections import Counter
from functools import cache
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import QualityConfig, TokenizerConfig
from data_pipeline.quality.perplexity import (
    SCORE_STEPS,
    Bounds,
    ReferenceModel,
    count_values,
    perplexity,
    resolve_bounds,
    train_reference,
)
from data_pipeline.tokenizer import Encoded, Tokenizer
from data_pipeline.tokenizer.training import train_tokenizer

VOCAB = 50
documents = st.lists(st.lists(st.integers(0, 5) | st.integers(0, VOCAB - 1), max_size=40), min_size=1, max_size=8)


def flat(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    encoded = Encoded.of([np.array(document, np.int32) for document in ids])
    return encoded.ids_T, encoded.ends_D


def trained(*batches: list[list[int]], bits: int = 20, tokens: int = 10_000, vocab_size: int = VOCAB) -> ReferenceModel:
    settings = QualityConfig(trusted="a", reference_bits=bits, reference_tokens=tokens)
    return train_reference(map(flat, batches), vocab_size, settings)


def slot(*ids: int, bits: int) -> int:
    """Return the counter that a pair or triple shares with others."""
    key = sum(i << 21 * place for place, i in enumerate(reversed(ids)))
    return (key * 0x9E3779B97F4A7C15 % 2**64) >> (64 - bits)


def expected_bits(corpus: list[list[int]], document: list[int], bits: int) -> float:
    """Return the mean of -log2 p by the formulas of the module, token by token."""
    start = VOCAB
    ones = Counter(i for text in corpus for i in text) + Counter({start: len(corpus)})
    twos = Counter(slot(*pair, bits=bits) for text in corpus for pair in pairwise([start, *text]))
    threes = Counter(
        slot(*triple, bits=bits) for text in corpus for triple in zip([start, start, *text], [start, *text], text, strict=False)
    )
    total = sum(len(text) for text in corpus)
    before: list[int] = [start, start]
    count_ab, seen, cost = ones[start], set(), 0.0
    for c in document:
        a, b = before[-2:]
        count_bc = min(twos[slot(b, c, bits=bits)], ones[b])
        count_abc = min(threes[slot(a, b, c, bits=bits)], count_ab, count_bc)
        p1 = (ones[c] + 1 / VOCAB) / (total + 1)
        p2 = (count_bc + 64 * p1) / (ones[b] + 64)
        p = (count_abc + 8 * p2) / (count_ab + 8)
        before.append(c)
        run = tuple(before[-9:]) if len(before) >= 11 else None
        cost -= math.log2((p + 1) / 2 if run in seen else p)
        seen |= {run} - {None}
        count_ab = count_bc
    return cost / max(len(document), 1)


@given(corpus=documents, judged=documents, bits=st.sampled_from([12, 16]))
def test_the_score_is_that_of_the_formulas(corpus: list[list[int]], judged: list[list[int]], bits: int) -> None:
    corpus = [*corpus, [1, 2]]
    judged = [*judged, judged[0] * 3, *corpus]
    scores = trained(corpus, bits=bits).score(*flat(judged))
    for score, document in zip(scores.tolist(), judged, strict=True):
        assert score / SCORE_STEPS == pytest.approx(expected_bits(corpus, document, bits), abs=0.005)


@given(judged=documents, window=st.sampled_from([16, 64]))
def test_the_score_of_a_document_does_not_depend_on_what_stands_around_it(judged: list[list[int]], window: int) -> None:
    model = trained([[1, 2, 3, 4, 5] * 9, [3, 1, 2] * 5])
    with mock.patch("data_pipeline.quality.perplexity._WINDOW_TOKENS", window):
        judged = [document * 3 for document in judged]
        alone = [int(model.score(*flat([document]))[0]) for document in judged]
        assert model.score(*flat(judged)).tolist() == alone
        assert model.score(*flat(judged[::-1])).tolist() == alone[::-1]


def test_where_a_long_document_is_cut_into_windows_does_not_show_in_its_score() -> None:
    document = np.random.default_rng(1).integers(0, VOCAB, 500).tolist()
    model = trained([document[100:300], document[250:400]])
    whole = model.score(*flat([document, document[7:]])).tolist()
    for window in (16, 100):
        with mock.patch("data_pipeline.quality.perplexity._WINDOW_TOKENS", window):
            assert model.score(*flat([document, document[7:]])).tolist() == whole


def test_collisions_of_the_hash_never_make_a_pair_more_frequent_than_its_first_token() -> None:
    generator = np.random.default_rng(0)
    corpus = [generator.integers(0, VOCAB, 4000).tolist()]
    crowded = trained(corpus, bits=12)
    unseen = [[49, 49, 49, 0, 0, 0, 7]]
    assert perplexity(crowded.score(*flat(unseen))[0]) > 1
    assert (crowded.score(*flat(corpus * 3)) > 0).all()


def test_a_stored_model_gives_the_same_scores_and_a_damaged_one_is_refused() -> None:
    parts = [[[1, 2, 3]], [[3, 2], [], [9] * 30], [[4, 4, 1]]]
    whole = trained(*parts)
    loaded = ReferenceModel.from_bytes(whole.to_bytes())
    assert loaded.score(*flat(parts[1])).tolist() == whole.score(*flat(parts[1])).tolist()
    with pytest.raises(PreparedDataError, match="reference model"):
        ReferenceModel.from_bytes(b"\x08" + bytes(30))


def test_the_model_takes_whole_documents_up_to_its_budget() -> None:
    texts = [[1, 2, 3], [4, 5], [6] * 9]
    assert trained(texts, tokens=1024).to_bytes() != trained(texts[:2], tokens=1024).to_bytes()
    small = mock.Mock(trusted="a", reference=None, reference_bits=12, reference_tokens=6)
    assert train_reference([flat(texts)], VOCAB, small).to_bytes() == trained(texts[:2], bits=12).to_bytes()


def test_a_reference_without_text_and_a_vocabulary_too_large_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quality\.trusted = a: no document of it"):
        trained()
    with pytest.raises(ConfigError, match="ids is too large"):
        trained([[1]], vocab_size=1 << 21)


@cache
def english() -> tuple[Tokenizer, list[str]]:
    """Paragraphs of prose in the standard library, and a tokenizer trained on them."""
    modules = [random, json, tempfile, math, inspect, Counter, pairwise]
    texts = [inspect.getdoc(value) or "" for module in modules for value in vars(module).values() if callable(value)]
    texts += [
        inspect.getdoc(value) or "" for kind in (str, bytes, dict, list, Exception, mock.Mock) for value in vars(kind).values()
    ]
    texts = sorted({text for text in texts if len(text) > 80})
    return train_tokenizer(texts, TokenizerConfig(kind="bpe", vocab_size=600)), texts


def test_text_without_sense_scores_high_and_text_that_repeats_itself_low() -> None:
    tokenizer, texts = english()
    draw = random.Random(5)
    draw.shuffle(texts)
    train, clean = texts[10:], " ".join(texts[:10])
    encoded = tokenizer.encode_flat(train)
    model = train_reference([(encoded.ids_T, encoded.ends_D)], tokenizer.vocab_size, QualityConfig(trusted="a"))
    words = clean.split()
    letters = " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in words)
    spam = " ".join(draw.choices(["casino", "pills", "discount", "viagra", "loan", "free", "buy", "cheap"], k=len(words)))
    repeated = " ".join(words[:12]) * 30
    shuffled = " ".join(draw.sample(words, len(words)))
    judged = tokenizer.encode_flat([repeated, "zxqv wjk plugh. " * 40, clean, shuffled, spam, letters])
    scores = [perplexity(score) for score in model.score(judged.ids_T, judged.ends_D)]
    assert max(scores[:2]) * 3 < scores[2]
    assert scores[2] * 2 < min(scores[3:])
    assert scores[2] * 20 < scores[5]


@given(
    scores=st.lists(st.integers(0, 300), min_size=1, max_size=200),
    low=st.none() | st.floats(0, 40),
    high=st.none() | st.floats(60, 100),
)
def test_percentiles_drop_at_most_the_share_that_is_asked_for(scores: list[int], low: float | None, high: float | None) -> None:
    array = np.array(scores, np.uint16)
    settings = QualityConfig(max_perplexity=None, min_perplexity_percentile=low, max_perplexity_percentile=high)
    bounds = resolve_bounds(count_values(array), settings)
    too_low, too_high = int((array < bounds.min_score).sum()), int((array > bounds.max_score).sum())
    assert too_low * 100 <= (low or 0) * len(scores)
    assert (len(scores) - too_high) * 100 >= (100 if high is None else high) * len(scores)
    if high is not None and high < 100:  # and no fewer than equal scores allow
        below = int((array < bounds.max_score).sum())
        assert below * 100 < high * len(scores)
    assert bounds == resolve_bounds(dict(reversed(count_values(array).items())), settings)


def test_values_cut_on_both_sides_and_the_stricter_bound_holds() -> None:
    scores = np.array([0, 511, 512, 1024, 2048, 2049, 5000], np.uint16)
    values = QualityConfig(min_perplexity=4, max_perplexity=256, min_good_probability=0.25)
    assert resolve_bounds(count_values(scores), values) == Bounds(512, 2048, 250)
    both = QualityConfig(min_perplexity=4, max_perplexity=256, max_perplexity_percentile=50, min_perplexity_percentile=10)
    assert resolve_bounds(count_values(scores), both) == Bounds(512, 1024, 500)
    assert resolve_bounds({}, both) == Bounds(512, 2048, 500)


@pytest.mark.parametrize(
    "settings",
    [
        {"good": ("a.txt",)},
        {"min_perplexity": 9, "max_perplexity": 8},
        {"min_perplexity_percentile": 9, "max_perplexity_percentile": 8},
    ],
)
def test_settings_that_would_keep_nothing_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"needs examples of both|nothing would be kept"):
        QualityConfig(**settings)
