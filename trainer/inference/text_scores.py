"""Scores of generated texts, which distinguish a model that writes varied text from a model that repeats itself.

Texts are cut into words and single punctuation marks (`words_and_marks`), called *tokens of a text*, so scores of models with
different tokenizers can be compared. Each function is pure. A score is None if there is too little text for it.

    score            definition                                                                  source
    repetition       share of 4-grams that repeat an earlier one of their text, mean over texts  Welleck et al., 2019 (seq-rep-4)
    distinct_n       different n-grams of all texts / n-grams of all texts                       Li et al., 2016
    self_bleu        BLEU-4 of each text against the others, mean                                Zhu et al., 2018
    type_token_ratio different words / words, over all texts                                     Templin, 1957
    mtld             mean length of stretches whose type-token ratio stays above 0.72            McCarthy and Jarvis, 2010
    coherence        cosine of the word counts of neighbouring sentences, mean                   Foltz et al., 1998; Hearst, 1997
    length_entropy   entropy of the sentences' lengths in words, 1: all differ                   Shannon, 1948
    shape_entropy    entropy of the sentences' shapes, 1: all differ                             Shannon, 1948
    perplexity       fluency: exp of the mean loss of the texts under a reference model          Jelinek et al., 1977
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
_MTLD_THRESHOLD = 0.72


@dataclass(frozen=True)
class Scores:
    num_texts: int
    num_words: int
    perplexity: float | None
    coherence: float | None
    repetition: float | None
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    self_bleu: float | None
    type_token_ratio: float | None
    mtld: float | None
    length_entropy: float | None
    shape_entropy: float | None

    def to_json(self) -> dict[str, float | int | None]:
        return asdict(self)


def score_texts(texts: Sequence[str], perplexity: float | None = None) -> Scores:
    tokens = [words_and_marks(text) for text in texts]
    all_words = [word for text in texts for word in words(text)]
    all_sentences = [sentence for text in texts for sentence in sentences(text)]
    return Scores(
        num_texts=len(texts),
        num_words=len(all_words),
        perplexity=perplexity,
        coherence=coherence(texts),
        repetition=repetition(tokens),
        distinct_1=distinct(tokens, 1),
        distinct_2=distinct(tokens, 2),
        distinct_3=distinct(tokens, 3),
        self_bleu=self_bleu(tokens),
        type_token_ratio=type_token_ratio(all_words),
        mtld=mtld(all_words),
        length_entropy=length_entropy(all_sentences),
        shape_entropy=shape_entropy(all_sentences),
    )


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
    logarithms = [math.log(_precision(hypothesis, references, order)) for order in range(1, min(_BLEU_ORDER, len(hypothesis)) + 1)]
    closest = min((len(reference) for reference in references), key=lambda size: (abs(size - len(hypothesis)), size))
    return math.exp(min(0.0, 1 - closest / len(hypothesis)) + fmean(logarithms))


def type_token_ratio(tokens: Sequence[Hashable]) -> float | None:
    """Return different tokens / tokens, in (0, 1]. It falls with the length of texts: compare equal lengths, or use `mtld`."""
    return len(set(tokens)) / len(tokens) if tokens else None


def mtld(tokens: Sequence[Hashable]) -> float | None:
    """Return the measure of textual lexical diversity: tokens / factors, mean of reading forwards and backwards; 2 or more.

    A factor is a sequence of tokens that ends when its type-token ratio has fallen to 0.72. The rest at the end counts as a part
    of a factor: `(1 - ratio) / (1 - 0.72)`. Returns None if no token comes twice, because there is no factor then.
    """
    if len(set(tokens)) == len(tokens):
        return None
    return fmean(len(tokens) / _factors(reading) for reading in (tokens, tokens[::-1]))


def coherence(texts: Sequence[str]) -> float | None:
    """Return the mean cosine of the word counts of neighbouring sentences of a text, in [0, 1].

    The mean over neighbours is the coherence measure of Foltz et al., and the cosine of plain word counts is the lexical cohesion
    of Hearst (TextTiling). A model that repeats one sentence reaches 1, so compare it with `repetition`.
    """
    counts = [[Counter(words(sentence)) for sentence in sentences(text)] for text in texts]
    cosines = [_cosine(*pair) for text in counts for pair in pairwise(text)]
    return fmean(cosines) if cosines else None


def length_entropy(all_sentences: Sequence[str]) -> float | None:
    return _evenness([len(words(sentence)) for sentence in all_sentences])


def shape_entropy(all_sentences: Sequence[str]) -> float | None:
    return _evenness([sentence_shape(sentence) for sentence in all_sentences])


def sentence_shape(sentence: str) -> str:
    """Return case and punctuation of a sentence: `A` for a word with a capital, `a` for another word, `0` for a number.

    Consecutive words of one kind count once, and so do equal marks: "In 1999, Ada Byron came!" has the shape `A0,Aa!`.
    """
    shape = ""
    for token in _WORD_OR_MARK.findall(sentence):
        kind = "0" if token.isnumeric() else token if not _WORD.match(token) else "A" if token[0].isupper() else "a"
        shape += "" if shape.endswith(kind) else kind
    return shape


def _ngrams(tokens: Sequence[Hashable], order: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1)]


def _precision(hypothesis: Sequence[Hashable], references: Sequence[Sequence[Hashable]], order: int) -> float:
    counts = Counter(_ngrams(hypothesis, order))
    allowed: Counter[tuple[Hashable, ...]] = Counter()
    for reference in references:
        allowed |= counts & Counter(_ngrams(reference, order))  # at most as often as in the hypothesis
    return ((counts & allowed).total() or _SMOOTHING) / counts.total()


def _factors(tokens: Iterable[Hashable]) -> float:
    factors, seen, size = 0.0, set[Hashable](), 0
    for token in tokens:
        seen.add(token)
        size += 1
        if len(seen) / size <= _MTLD_THRESHOLD:
            factors, seen, size = factors + 1, set(), 0
    return factors + ((1 - len(seen) / size) / (1 - _MTLD_THRESHOLD) if size else 0.0)


def _cosine(one: Counter[str], other: Counter[str]) -> float:
    product = sum(count * other[word] for word, count in one.items())
    squares = math.prod(sum(count * count for count in counts.values()) for counts in (one, other))
    return min(1.0, product / math.sqrt(squares))


def _evenness(values: Sequence[Hashable]) -> float | None:
    """Return `-sum p log p` of the values' shares, divided by the logarithm of their number; None for fewer than two values."""
    if len(values) < 2:
        return None
    shares = [count / len(values) for count in Counter(values).values()]
    return min(1.0, max(0.0, -math.fsum(share * math.log(share) for share in shares) / math.log(len(values))))
