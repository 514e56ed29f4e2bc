"""The texts that a run writes at each evaluation, from the same prompts each time, and the scores of docs/generation.md.

Texts are cut into words and single punctuation marks (`words_and_marks`), called *tokens of a text*, so scores of models with
different tokenizers can be compared. A score is None if there is too little text for it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np

from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer
from trainer.config import EvalConfig, TrainConfig
from trainer.inference.likelihood import cut_windows, num_common, score_windows
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Continuation, TextModel, evaluating, uncompiled
from trainer.runs.events import perplexity

_NUM_BEGINNINGS = 4
_BEGINNING_TOKENS = 16
_WINDOWS_AT_ONCE = 8
_INCOMPLETE = "\ufffd"
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
_WORD_OR_MARK = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_STOP = r"[.!?\u2026]++[\"'\u201d\u2019)\]]*+"
_SENTENCE = re.compile(
    rf"[^\n](?:[^\n.!?\u2026\u3002\uff01\uff1f]++|{_STOP}(?!\s|\Z))*+(?:{_STOP}|[\u3002\uff01\uff1f]++|(?=\n|\Z))"
)
_REPETITION_ORDER = 4
_BLEU_ORDER = 4
_SMOOTHING = 0.1


def prompts_of(settings: EvalConfig, rows: Rows, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the prompts of a run: `eval.prompts` if it is set, else `eval.prompt` and the beginnings of four validation rows.

    The rows are spread evenly over the validation set. A beginning is the first 16 tokens of a row, or its first document if that
    is shorter. There are no prompts if `eval.sample_tokens` is 0.
    """
    if not settings.sample_tokens:
        return ()
    if settings.prompts:
        return settings.prompts
    texts = [settings.prompt]
    num_rows = min(_NUM_BEGINNINGS, len(rows))
    batch = rows.read(np.arange(num_rows) * len(rows) // num_rows)
    for tokens_L, segments_L in zip(batch.tokens_BL, batch.segments_BL, strict=True):
        size = min(_BEGINNING_TOKENS, int((segments_L == 0).sum()))
        texts.append(tokenizer.decode(tokens_L[:size].tolist()).rstrip(_INCOMPLETE))
    return tuple(dict.fromkeys(filter(None, texts))) or ("",)


def sample_and_score(
    source: TextModel, prompts: Sequence[str], sampling: Sampling, config: TrainConfig
) -> tuple[list[Continuation], dict[str, float | None] | None]:
    """Continue all prompts in one batch, and score the texts. If the weights are sharded, all ranks must call this."""
    written = source.complete(prompts, sampling)
    if not config.eval.score:
        return written, None
    return written, score_texts([one.text for one in written], text_perplexity(source, config, written))


def text_perplexity(reference: TextModel, config: TrainConfig, written: Sequence[Continuation]) -> float | None:
    """Return `exp` of the mean loss of the written tokens under a model, each after its prompt and the text before it.

    A text is cut into the reference's tokens together with its prompt. Tokens that the prompt alone has too are not counted.
    Results of references with different tokenizers cannot be compared. None if there are no tokens, NaN if a loss is NaN.
    """
    windows = []
    for one in written:
        tokens, given = (reference.prompt_tokens(text) for text in (one.prompt + one.text, one.prompt))
        first = max(1, num_common(tokens, given))
        windows += cut_windows(tokens[:first], tokens[first:], reference.context)
    num_tokens = sum(len(window.targets) for window in windows)
    if not num_tokens:
        return None
    with evaluating(reference.model), uncompiled():
        scored = score_windows(reference.model, windows, reference.tokenizer.vocab_size, config, _WINDOWS_AT_ONCE)
    return perplexity(math.fsum(likelihood.nats for likelihood in scored) / num_tokens)


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
