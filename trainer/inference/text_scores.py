"""Scores of generated texts: numbers that tell a model that writes from one that repeats itself.

Texts are cut into *tokens of a text*, which are words and single marks (`words_and_marks`), so that scores of models with different
tokenizers can be compared. Each function is pure; where a score is not defined, for lack of text, it is None.

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

__all__ = [
    "Scores",
    "bleu",
    "coherence",
    "distinct",
    "length_entropy",
    "mtld",
    "repetition",
    "score_texts",
    "self_bleu",
    "sentence_shape",
    "sentences",
    "shape_entropy",
    "type_token_ratio",
    "words",
    "words_and_marks",
]

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_WORD_OR_MARK = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_SENTENCE = re.compile(r"[^\n]+?(?:[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s|\Z)|[\u3002\uff01\uff1f]+|(?=\n|\Z))")
_REPETITION_ORDER = 4
_BLEU_ORDER = 4
_SMOOTHING = 0.1
_MTLD_THRESHOLD = 0.72


@dataclass(frozen=True)
class Scores:
    """Of some texts; see the top of this file. None where there is too little text."""

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
        """All scores by name; None where one is not defined."""
        return asdict(self)


def score_texts(texts: Sequence[str], perplexity: float | None = None) -> Scores:
    """All scores of some texts. `perplexity` needs a model, and is measured elsewhere: `trainer.inference.samples.perplexity`."""
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
    """Runs of letters, digits and underscores, with apostrophes inside, without regard to case."""
    return [word.casefold() for word in _WORD.findall(text)]


def words_and_marks(text: str) -> list[str]:
    """The same, and every mark that is neither of these nor white space as a token of its own."""
    return [token.casefold() for token in _WORD_OR_MARK.findall(text)]


def sentences(text: str) -> list[str]:
    """Stretches of a text that hold a word: they end at a line's end, or at . ! ? or an ellipsis before white space.

    Closing quotes and brackets belong to the sentence before. Chinese and Japanese full stops, exclamation and question marks end
    one without white space.
    """
    return [part.strip() for part in _SENTENCE.findall(text) if _WORD.search(part)]


def repetition(texts: Sequence[Sequence[Hashable]], order: int = _REPETITION_ORDER) -> float | None:
    """seq-rep-n: `1 - different n-grams / n-grams` of each text, mean over the texts that have an n-gram; in [0, 1)."""
    shares = [1 - len(set(grams)) / len(grams) for grams in (_ngrams(text, order) for text in texts) if grams]
    return fmean(shares) if shares else None


def distinct(texts: Sequence[Sequence[Hashable]], order: int) -> float | None:
    """distinct-n: different n-grams of all texts together over their number, in (0, 1].

    Li et al. divide by the number of tokens, which is more than the number of n-grams: 1 could not be reached.
    """
    grams = [gram for text in texts for gram in _ngrams(text, order)]
    return len(set(grams)) / len(grams) if grams else None


def self_bleu(texts: Sequence[Sequence[Hashable]]) -> float | None:
    """The mean `bleu` of each text with all others as its references, in [0, 1]; 1: all say the same. Empty texts are left out."""
    filled = [text for text in texts if text]
    if len(filled) < 2:
        return None
    return fmean(bleu(text, filled[:place] + filled[place + 1 :]) for place, text in enumerate(filled))


def bleu(hypothesis: Sequence[Hashable], references: Sequence[Sequence[Hashable]]) -> float:
    """BLEU of one sentence (Papineni et al., 2002), in [0, 1].

    `brevity * exp(mean over n of log p_n)` with n from 1 to 4, or to the length of the hypothesis if that is shorter. p_n is the
    share of its n-grams that stand in a reference, each counted at most as often as in the reference that has it most often; where
    none does, 0.1 counts instead of 0 (Chen and Cherry, 2014, method 1). `brevity` is `exp(1 - r / c)` where the hypothesis, of c
    tokens, is shorter than the reference whose length r is closest, the shorter of two, else 1.

    Args:
        hypothesis: one token or more.
        references: one or more.
    """
    logarithms = [math.log(_precision(hypothesis, references, order)) for order in range(1, min(_BLEU_ORDER, len(hypothesis)) + 1)]
    closest = min((len(reference) for reference in references), key=lambda size: (abs(size - len(hypothesis)), size))
    return math.exp(min(0.0, 1 - closest / len(hypothesis)) + fmean(logarithms))


def type_token_ratio(tokens: Sequence[Hashable]) -> float | None:
    """Different tokens over tokens, in (0, 1]. It falls as texts get longer: compare texts of one length, or use `mtld`."""
    return len(set(tokens)) / len(tokens) if tokens else None


def mtld(tokens: Sequence[Hashable]) -> float | None:
    """Measure of textual lexical diversity: tokens over factors, mean of reading forwards and backwards; 2 or more.

    A factor is a stretch that ends where its type-token ratio has fallen to 0.72. The stretch that is left over at the end counts
    as the part of a factor that it has gone: `(1 - ratio) / (1 - 0.72)`. None where no token comes twice: there is no factor then.
    """
    if len(set(tokens)) == len(tokens):
        return None
    return fmean(len(tokens) / _factors(reading) for reading in (tokens, tokens[::-1]))


def coherence(texts: Sequence[str]) -> float | None:
    """How much of its words a sentence shares with the next: the mean cosine of neighbouring sentences, in [0, 1].

    The mean over neighbours is Foltz et al.'s measure of coherence, the cosine of plain word counts Hearst's of lexical cohesion
    (TextTiling); neighbours are of one text. A model that repeats its sentence reaches 1, so read it beside `repetition`.
    """
    counts = [[Counter(words(sentence)) for sentence in sentences(text)] for text in texts]
    cosines = [_cosine(*pair) for text in counts for pair in pairwise(text)]
    return fmean(cosines) if cosines else None


def length_entropy(all_sentences: Sequence[str]) -> float | None:
    """Entropy of the sentences' numbers of words over the largest that as many sentences can have, in [0, 1]."""
    return _evenness([len(words(sentence)) for sentence in all_sentences])


def shape_entropy(all_sentences: Sequence[str]) -> float | None:
    """The same of the sentences' shapes."""
    return _evenness([sentence_shape(sentence) for sentence in all_sentences])


def sentence_shape(sentence: str) -> str:
    """Case and punctuation of a sentence, without its words: `A` for a word with a capital, `a` for another, `0` for a number.

    Words of one kind in a row count once, as marks of one kind do: "In 1999, Ada Byron came!" has the shape `A0,Aa!`.
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
        allowed |= counts & Counter(_ngrams(reference, order))  # no more can count
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
    """In [0, 1]; both hold a word."""
    product = sum(count * other[word] for word, count in one.items())
    squares = math.prod(sum(count * count for count in counts.values()) for counts in (one, other))
    return min(1.0, product / math.sqrt(squares))


def _evenness(values: Sequence[Hashable]) -> float | None:
    """`-sum p log p` of the values' shares, over the logarithm of their number; None for fewer than two."""
    if len(values) < 2:
        return None
    shares = [count / len(values) for count in Counter(values).values()]
    return min(1.0, max(0.0, -math.fsum(share * math.log(share) for share in shares) / math.log(len(values))))
