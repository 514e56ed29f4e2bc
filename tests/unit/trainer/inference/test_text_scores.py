from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.inference.samples import (
    bleu,
    coherence,
    distinct,
    repetition,
    score_texts,
    self_bleu,
    sentences,
    words,
    words_and_marks,
)

TOKENS = st.lists(st.sampled_from("abcd"), max_size=12)
CORPUS = st.lists(TOKENS, max_size=5)
PROSE = st.text("abAB 1.,!?\n", max_size=60)


def test_words_are_cut_as_the_definition_says() -> None:
    assert words("Don't stop, 2nd O\u2019Neil_x! ÉTÉ") == ["don't", "stop", "2nd", "o\u2019neil_x", "été"]
    assert words_and_marks("x += 'a' # Hi") == ["x", "+", "=", "'", "a", "'", "#", "hi"]


def test_sentences_end_at_marks_before_space_at_lines_and_at_cjk_marks() -> None:
    text = 'It is 3.5 m. "Is it?" he said. Yes...\nx = f(1)\n\n!!! 好。吗\uff1f end'
    assert sentences(text) == ["It is 3.5 m.", '"Is it?"', "he said.", "Yes...", "x = f(1)", "好。", "吗\uff1f", "end"]


def test_repetition_is_the_share_of_ngrams_that_were_there_before() -> None:
    # 5 4-grams of which 3 differ: abab, baba, abab, baba, abac
    assert repetition(["abababac"]) == pytest.approx(1 - 3 / 5)
    assert repetition(["abababac", "abcdef", "ab"]) == pytest.approx((1 - 3 / 5 + 0) / 2)
    assert repetition(["aab"], order=1) == pytest.approx(1 / 3)
    assert repetition(["abc", ""]) is None


def test_distinct_counts_over_all_texts() -> None:
    assert distinct(["aab", "ab"], 1) == pytest.approx(2 / 5)
    assert distinct(["aab", "ab"], 2) == pytest.approx(2 / 3)
    assert distinct(["a", ""], 2) is None


def test_bleu_of_worked_examples() -> None:
    # Papineni et al., 2002, section 2: "the the the the the the the" has a clipped unigram precision of 2/7
    references = [words("the cat is on the mat"), words("there is a cat on the mat")]
    seven = ["the"] * 7
    expected = [2 / 7, 0.1 / 6, 0.1 / 5, 0.1 / 4]
    assert bleu(seven, references) == pytest.approx(math.prod(expected) ** 0.25)
    # only "the cat on" and "the cat on the" are in no reference; it is one token shorter than the closest one
    candidate = words("the cat on the mat")
    precisions = [5 / 5, 4 / 4, 2 / 3, 1 / 2]
    assert bleu(candidate, references) == pytest.approx(math.exp(1 - 6 / 5) * math.prod(precisions) ** 0.25)
    assert bleu(["a", "b"], [["a", "b"]]) == 1  # shorter than four tokens: one- and two-grams only


def test_the_closest_reference_decides_the_brevity_and_of_two_the_shorter() -> None:
    assert bleu("aaaa", ["aa", "aaaaaa"]) == pytest.approx(bleu("aaaa", ["aaaaaa", "aaa"]))
    assert bleu("aaaa", ["aaaaa"]) == pytest.approx(math.exp(1 - 5 / 4))


def test_coherence_is_the_cosine_of_neighbours_within_a_text() -> None:
    assert coherence(["The cat sat. The cat ran."]) == pytest.approx(2 / 3)
    assert coherence(["The cat sat.", "The cat ran."]) is None
    assert coherence(["A b. C d. C d."]) == pytest.approx(0.5)


@given(corpus=CORPUS, order=st.integers(1, 4))
def test_shares_stay_within_their_bounds_and_do_not_depend_on_the_order_of_the_texts(corpus: list[list[str]], order: int) -> None:
    for score, lowest in ((repetition(corpus, order), 0.0), (distinct(corpus, order), 0.0), (self_bleu(corpus), 0.0)):
        assert score is None or lowest <= score <= 1 + 1e-12
    assert distinct(corpus, order) == distinct(corpus[::-1], order)
    assert self_bleu(corpus) == pytest.approx(self_bleu(corpus[::-1]))
    assert repetition(corpus, order) == pytest.approx(repetition(corpus[::-1], order))


@given(corpus=CORPUS, order=st.integers(1, 4))
def test_names_of_tokens_do_not_matter(corpus: list[list[str]], order: int) -> None:
    renamed = [[f"<{token}>" for token in text] for text in corpus]
    assert (repetition(corpus, order), distinct(corpus, order)) == (repetition(renamed, order), distinct(renamed, order))
    assert self_bleu(corpus) == self_bleu(renamed)


@given(text=TOKENS.filter(bool), copies=st.integers(2, 4), order=st.integers(1, 3))
def test_copies_of_a_text_say_nothing_new(text: list[str], copies: int, order: int) -> None:
    assert self_bleu([text] * copies) == pytest.approx(1)
    once = distinct([text], order)
    assert once is None or distinct([text] * copies, order) == pytest.approx(once / copies)
    assert repetition([text] * copies, order) == (None if once is None else pytest.approx(1 - once))


@given(corpus=st.lists(TOKENS.filter(bool), min_size=2, max_size=4))
def test_texts_without_a_common_token_have_a_self_bleu_near_zero(corpus: list[list[str]]) -> None:
    apart = [[f"{number}{token}" for token in text] for number, text in enumerate(corpus)]
    score = self_bleu(apart)
    assert score is not None
    assert score <= 0.1 + 1e-12


@given(texts=st.lists(PROSE, max_size=4))
def test_scores_of_any_texts_stay_within_their_bounds(texts: list[str]) -> None:
    scores = score_texts(texts)
    assert scores["num_texts"] == len(texts)
    for name, value in scores.items():
        if name not in ("num_texts", "num_words", "perplexity"):
            assert value is None or -1e-12 <= value <= 1 + 1e-12, name
    if scores["num_words"]:
        assert scores["distinct_1"] is not None


@given(sentence=st.text("ab ,1", min_size=1, max_size=12).filter(lambda text: any(c.isalnum() for c in text)))
def test_a_text_that_repeats_its_sentence_is_coherent(sentence: str) -> None:
    text = f"{sentence}. " * 3
    assert coherence([text]) == pytest.approx(1)


def test_all_scores_of_two_texts() -> None:
    scores = score_texts(["The cat sat. The cat ran.", "A dog, here!"], perplexity=7.5)
    assert scores == {
        "num_texts": 2,
        "num_words": 9,
        "perplexity": 7.5,
        "coherence": pytest.approx(2 / 3),
        "repetition": 0.0,
        "distinct_1": pytest.approx(10 / 13),  # the cat sat . ran a dog , here !
        "distinct_2": pytest.approx(10 / 11),  # only "the cat" comes twice
        "self_bleu": scores["self_bleu"],
    }


def test_too_little_text_has_no_scores_and_fails_nowhere() -> None:
    assert set(score_texts([]).values()) == {0, None}
    assert score_texts(["", " \n", "!"])["distinct_1"] == 1
