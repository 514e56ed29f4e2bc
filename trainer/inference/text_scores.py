"""Scores of generated texts, which distinguish a model that writes varied text from a model that repeats itself.

Texts are cut into words and single punctuation marks (`words_and_marks`), called *tokens of a text*, so scores of models with
different tokenizers can be compared. Each function is pure. A score is None if there is too little text for it.

    score        definition                                                                  source
    perplexity   fluency: exp of the mean loss of the texts under a reference model          Jelinek et al., 1977
    coherence    cosine of the word counts of neighbouring sentences, mean                   Foltz et al., 1998; Hearst, 1997
    repetition   share of 4-grams that repeat an earlier one of their text, mean over texts  Welleck et al., 2019 (seq-rep-4)
    distinct_n   different n-grams of all texts / n-grams of all texts                       Li et al., 2016
    self_bleu    BLEU-4 of each text against the others, mean                                Zhu et al., 2018
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from statistics import fmean

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_WORD_OR_MARK = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_STOP = r"[.!?\u2026]++[\"'\u201d\u2019)\]]*+"
_SENTENCE = re.compile(
    rf"[^\n](?:[^\n.!?\u2026\u3002\uff01\uff1f]++|{_STOP}(?!\s|\Z))*+(?:{_STOP}|[\u3002\uff01\uff1f]++|(?=\n|\Z))"
)
_REPETITION_ORDER = 4
_BLEU_ORDER = 4
_SMOOTHING = 0.1


def score_texts(texts: Sequence[str], perplexity: float | None = None) -> dict[str, float | None]:
    tokens = [words_and_marks(text) for text in texts]
    return {
        "num_texts": len(texts),
        "num_words": sum(len(words(text)) for text in texts),
        "perplexity": perplexity,
        "coherence": coherence(texts),
        "repetition": repetition(tokens),
        "distinct_1": distinct(tokens, 1),
        "distinct_2": distinct(tokens, 2),
        "self_bleu": self_bleu(tokens),
    }


def words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def words_and_marks(text: str) -> list[str]:
    return [token.casefold() for token in _WORD_OR_MARK.findall(text)]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text that contain a word. A sentence ends at a line's end, or at . ! ? or … before white space.

    Closing quotes and brackets belong to the sentence before them. Chinese and Japanese full stops, exclamation marks and question
    marks end a sentence without white space after them.
    """
    return [part.strip() for part in _SENTENCE.findall(text) if _WORD.search(part)]


def repetition(texts: Sequence[Sequence[Hashable]], order: int = _REPETITION_ORDER) -> float | None:
    """Return seq-rep-n: `1 - different n-grams / n-grams` of each text, mean over the texts that have an n-gram; in [0, 1)."""
    shares = [1 - len(set(grams)) / len(grams) for grams in (_ngrams(text, order) for text in texts) if grams]
    return fmean(shares) if shares else None


def distinct(texts: Sequence[Sequence[Hashable]], order: int) -> float | None:
    """Return distinct-n: different n-grams of all texts / n-grams of all texts, in (0, 1].

    Li et al. divide by the number of tokens. That is more than the number of n-grams, so their score cannot reach 1.
    """
    grams = [gram for text in texts for gram in _ngrams(text, order)]
    return len(set(grams)) / len(grams) if grams else None


def self_bleu(texts: Sequence[Sequence[Hashable]]) -> float | None:
    """Return the mean `bleu` of each text with all others as references, in [0, 1]; 1: all are equal. Empty texts are left out."""
    filled = [text for text in texts if text]
    if len(filled) < 2:
        return None
    return fmean(bleu(text, filled[:place] + filled[place + 1 :]) for place, text in enumerate(filled))


def bleu(hypothesis: Sequence[Hashable], references: Sequence[Sequence[Hashable]]) -> float:
    """Return BLEU of one sentence (Papineni et al., 2002), in [0, 1], for at least one token and one reference.

    It is `brevity * exp(mean over n of log p_n)` with n from 1 to 4, or to the length of the hypothesis if that is shorter. p_n is
    the share of the hypothesis's n-grams that a reference contains. An n-gram counts at most as often as in the reference that
    contains it most often. If no reference contains any, 0.1 counts instead of 0 (Chen and Cherry, 2014, method 1). For a
    hypothesis of c tokens, r is the length of the reference that is closest to c, the shorter of two; `brevity` is `exp(1 - r /
    c)` if c < r, else 1.
    """
    logarithms = []
    for order in range(1, min(_BLEU_ORDER, len(hypothesis)) + 1):
        counts = Counter(_ngrams(hypothesis, order))
        allowed: Counter[tuple[Hashable, ...]] = Counter()
        for reference in references:
            allowed |= counts & Counter(_ngrams(reference, order))  # at most as often as in the hypothesis
        logarithms.append(math.log((allowed.total() or _SMOOTHING) / counts.total()))
    closest = min((len(reference) for reference in references), key=lambda size: (abs(size - len(hypothesis)), size))
    return math.exp(min(0.0, 1 - closest / len(hypothesis)) + fmean(logarithms))


def coherence(texts: Sequence[str]) -> float | None:
    """Return the mean cosine of the word counts of neighbouring sentences of a text, in [0, 1].

    The mean over neighbours is the coherence measure of Foltz et al., and the cosine of plain word counts is the lexical cohesion
    of Hearst (TextTiling). A model that repeats one sentence reaches 1, so compare it with `repetition`.
    """
    cosines = []
    for text in texts:
        counts = [Counter(words(sentence)) for sentence in sentences(text)]
        for one, other in pairwise(counts):
            product = sum(count * other[word] for word, count in one.items())
            norms = math.prod(sum(count * count for count in each.values()) for each in (one, other))
            cosines.append(min(1.0, product / math.sqrt(norms)))
    return fmean(cosines) if cosines else None


def _ngrams(tokens: Sequence[Hashable], order: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1)]
