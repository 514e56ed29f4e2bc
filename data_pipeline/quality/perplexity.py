"""Score texts by their perplexity under a reference model of token ids, and judge them by the bounds of their source.

Scores come from integers and from float64 operations that IEEE 754 defines to the last bit (+, *, /), in a fixed order, so they are
equal on every machine and in any batch. Singles, pairs and triples are counted, with a Dirichlet prior (MacKay and Peto 1995):

    p(c) = (n(c) + 1/V) / (n + 1)
    p(c | b) = (n(bc) + m2 p(c)) / (n(b) + m2)
    p(c | ab) = (n(abc) + m3 p(c | b)) / (n(ab) + m3)

Pairs and triples have 2**bits counters each, found by hash. A counter that several keys share can be too high, so the count of its
context limits it. If a token ends a run of nine tokens that occurred before in the document, its probability is the mean of p and 1
(a cache model, Kuhn and De Mori 1990). So repetitive text has a low perplexity.

Shape suffixes: T token ids of all texts, D texts, N counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import QualityConfig
from data_pipeline.quality.classifier import PROBABILITY_STEPS, Ids
from data_pipeline.text import Hashes, Int64s, mix_hashes

Counts = NDArray[np.uint32]
Scores = NDArray[np.uint16]
SCORE_STEPS = 256  # a perplexity score is the mean of -log2 p over the tokens of a text, in steps of 1/256 bit
MAX_SCORE = 0xFFFF
_ID_BITS = 21
_PAIR_PRIOR, _TRIPLE_PRIOR = 64.0, 8.0  # m2 and m3: the best of 1 to 1000 for the perplexity of held-out prose, November 2026
_WINDOW_TOKENS = 1 << 16  # in which repeated runs are found; the arrays of one window fit in the processor's cache
_MULTIPLIERS = tuple(np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xCA5A826395121157))
TOKEN_STEPS = 1024  # steps per bit of the cost of one token
_MIN_EXPONENT = -63
_MANTISSA_BITS = 10


def _cost_table() -> NDArray[np.int32]:
    """Return -log2 p in 1/1024 bit, by the exponent and the first ten bits of the mantissa of p, from 2**-63 to 1."""
    steps = np.arange(-_MIN_EXPONENT << _MANTISSA_BITS)
    exponents, mantissas = np.divmod(steps, 1 << _MANTISSA_BITS)
    middle = 1 + (mantissas + 0.5) / (1 << _MANTISSA_BITS)
    return np.append(np.rint(-TOKEN_STEPS * (exponents + _MIN_EXPONENT + np.log2(middle))), 0).astype(np.int32)


_COSTS = _cost_table()


@dataclass(frozen=True)
class ReferenceModel:
    singles_V: Counts  # the last count is that of the start of a text, which occurs only as context
    pairs_N: Counts
    triples_N: Counts

    def to_bytes(self) -> bytes:
        return save(dict(vars(self)))

    @staticmethod
    def from_bytes(data: bytes) -> ReferenceModel:
        try:
            model = ReferenceModel(**load(data))
            shapes = [(array.ndim, array.dtype == np.uint32, array.size > 1) for array in vars(model).values()]
            sizes = {model.pairs_N.size.bit_count(), model.triples_N.size.bit_count()}
            if set(shapes) != {(1, True, True)} or sizes != {1}:
                raise TypeError("its arrays are not counts, or their number is not a power of two")
        except (SafetensorError, TypeError) as error:
            raise PreparedDataError(f"reference model: {error}; run `prepare` again in its folder") from None
        return model

    def score(self, ids_T: Ids, ends_D: Int64s) -> Scores:
        """Return the mean cost of each text, -log2 p per token, in steps of 1/256 bit; 0 for an empty text."""
        start = len(self.singles_V) - 1  # of a text: higher than all token ids
        counts_V = self.singles_V[:-1].astype(np.float64)
        singles_V = (counts_V + 1.0 / start) / (counts_V.sum() + 1.0)
        totals_T1 = np.zeros(len(ids_T) + 1, np.int64)
        count_before = 0
        for block in _blocks(ids_T, ends_D, start):
            count_b = self.singles_V[block.before_T]
            count_bc = np.minimum(self.pairs_N[_slot(block.pair_T, self.pairs_N)], count_b)
            count_ab = np.concatenate([[count_before], count_bc[:-1]]).astype(np.uint32)
            count_ab[block.before_T == start] = self.singles_V[start]
            count_abc = np.minimum(self.triples_N[_slot(block.triple_T, self.triples_N)], np.minimum(count_ab, count_bc))
            p_T = (count_bc + _PAIR_PRIOR * singles_V[block.ids_T]) / (count_b + _PAIR_PRIOR)  # p(c | b)
            p_T *= _TRIPLE_PRIOR
            p_T += count_abc
            p_T /= count_ab + _TRIPLE_PRIOR  # p(c | ab)
            count_before = int(count_bc[-1])  # the next block begins after this pair
            repeats = block.repeats()
            p_T[repeats] = 0.5 * (p_T[repeats] + 1.0)
            bits_T = np.clip(p_T, 2.0**_MIN_EXPONENT, 1.0).view(np.int64)  # exponent and mantissa are the index into the table
            index_T = (bits_T >> (52 - _MANTISSA_BITS)) - ((1023 + _MIN_EXPONENT) << _MANTISSA_BITS)
            totals_T1[block.first + 1 : block.first + 1 + len(p_T)] = _COSTS[index_T]
        np.cumsum(totals_T1, out=totals_T1)
        return mean_scores(np.diff(totals_T1[ends_D], prepend=0), np.diff(ends_D, prepend=0))


def train_reference(batches: Iterable[tuple[Ids, Int64s]], vocab_size: int, settings: QualityConfig) -> ReferenceModel:
    """Train the model on batches of token ids and text ends of a trusted source, up to `reference_tokens` tokens."""
    if vocab_size >= 1 << _ID_BITS:
        raise ConfigError(f"quality: a vocabulary of {vocab_size} ids is too large; fewer than {1 << _ID_BITS} are needed")
    singles_V = np.zeros(vocab_size + 1, np.uint32)
    pairs_N, triples_N = np.zeros((2, 1 << settings.reference_bits), np.uint32)
    num_left = settings.reference_tokens
    for ids_T, ends_D in batches:
        kept_D = ends_D[: int(np.searchsorted(ends_D, num_left, side="right"))]
        kept_T = ids_T[: kept_D[-1] if len(kept_D) else 0]
        for block in _blocks(kept_T, kept_D, vocab_size):
            np.add.at(singles_V, block.ids_T, np.uint32(1))
            np.add.at(pairs_N, _slot(block.pair_T, pairs_N), np.uint32(1))
            np.add.at(triples_N, _slot(block.triple_T, triples_N), np.uint32(1))
        singles_V[vocab_size] += len(kept_D)
        num_left -= len(kept_T)
        if len(kept_D) < len(ends_D):
            break
    if num_left == settings.reference_tokens:
        named = f"trusted = {settings.trusted}" if settings.trusted is not None else f"reference = {settings.reference}"
        raise ConfigError(
            f"quality.{named}: no document of it is kept for training within {settings.reference_tokens} tokens; "
            "name another text, or raise quality.reference_tokens"
        )
    return ReferenceModel(singles_V, pairs_N, triples_N)


def mean_scores(sums_D: Int64s, counts_D: Int64s) -> Scores:
    """Return the mean of some costs of each text, given in 1/1024 bit, as its score."""
    steps_D = np.maximum(counts_D, 1) * (TOKEN_STEPS // SCORE_STEPS)
    scores_D: Scores = np.clip((sums_D + steps_D // 2) // steps_D, 0, MAX_SCORE).astype(np.uint16)
    return scores_D


def perplexity(score: float) -> float:
    return float(2.0 ** (score / SCORE_STEPS))


def count_values(values_D: NDArray[Any]) -> dict[str, int]:
    values, counts = np.unique(values_D, return_counts=True)
    return {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


# The bounds of a source


@dataclass(frozen=True)
class Bounds:
    """Scores between which a source's documents are kept, inclusive."""

    min_score: int
    max_score: int
    min_probability: int  # minimum probability of the classifier, in steps of 1/1000


def resolve_bounds(histogram: Mapping[str, int], settings: QualityConfig) -> Bounds:
    """Return the bounds of a source whose documents have these scores. Of a value and a percentile the stricter one applies."""
    scores = np.array(sorted(map(int, histogram)), np.int64)
    cumulative = np.cumsum([histogram[str(score)] for score in scores.tolist()])
    lows, highs = [0], [MAX_SCORE]
    if settings.min_perplexity is not None:
        lows.append(math.ceil(SCORE_STEPS * math.log2(settings.min_perplexity)))
    if settings.max_perplexity is not None:
        highs.append(math.floor(SCORE_STEPS * math.log2(settings.max_perplexity)))
    if len(scores):
        total = int(cumulative[-1])
        if (percentile := settings.min_perplexity_percentile) is not None:
            place = int(np.searchsorted(cumulative * 100, percentile * total, side="right"))
            lows.append(int(scores[min(place, len(scores) - 1)]))
        if (percentile := settings.max_perplexity_percentile) is not None:
            highs.append(int(scores[np.searchsorted(cumulative * 100, percentile * total, side="left")]))
    return Bounds(max(lows), min(highs), math.ceil(settings.min_good_probability * PROBABILITY_STEPS))


# The tokens in blocks


@dataclass(frozen=True)
class _Block:
    first: int  # index of its first token among all tokens
    window_T: Int64s
    ids_T: Ids
    before_T: Ids  # the token before each token, or the id of the start of a text
    triple_T: Hashes  # each token and the two before it, as one number

    @property
    def pair_T(self) -> Hashes:
        return self.triple_T & np.uint64((1 << 2 * _ID_BITS) - 1)

    def repeats(self) -> Int64s:
        """Return the tokens that end a run of nine tokens which occurs earlier in the window.

        In each round runs are hashed to slots; the first in a slot occupies it. An equal later one is a repeat, others try again.
        """
        runs_T = self.triple_T * _MULTIPLIERS[0]
        runs_T[6:] += self.triple_T[3:-3] * _MULTIPLIERS[1] + self.triple_T[:-6] * _MULTIPLIERS[2]
        hashes_T = runs_T + self.window_T.view(np.uint64) * _MULTIPLIERS[1]
        first_in_slot = np.empty(2 * _WINDOW_TOKENS, np.int32)
        places = np.flatnonzero(self.window_T[6:] == self.window_T[:-6]).astype(np.int32) + 6
        found = [places[:0]]
        while len(places):
            hashes = mix_hashes(hashes_T[places] + np.uint64(len(found)))
            slots = (hashes >> np.uint64(64 - _WINDOW_TOKENS.bit_length())).view(np.int64)
            first_in_slot[slots[::-1]] = places[::-1]
            first = first_in_slot[slots]
            is_later = first < places
            first, places = first[is_later], places[is_later]
            is_same = (runs_T[first] == runs_T[places]) & (self.window_T[first] == self.window_T[places])
            found.append(places[is_same])
            places = places[~is_same]
        return np.concatenate(found)


def _blocks(ids_T: Ids, ends_D: Int64s, start: int) -> Iterator[_Block]:
    """Yield the tokens in blocks of whole windows. A window is up to `_WINDOW_TOKENS` consecutive tokens of one text."""
    lengths_D = np.diff(ends_D, prepend=0)
    before_T = np.concatenate([[start], ids_T[:-1]]).astype(np.int32)[: len(ids_T)]
    starts_D = (ends_D - lengths_D)[lengths_D > 0]
    before_T[starts_D] = start
    windows_D = -(-lengths_D // _WINDOW_TOKENS)
    number_W = np.arange(windows_D.sum()) - np.repeat(np.cumsum(windows_D) - windows_D, windows_D)
    ends_W = np.minimum(np.repeat(ends_D - lengths_D, windows_D) + (number_W + 1) * _WINDOW_TOKENS, np.repeat(ends_D, windows_D))
    window = first = 0
    while window < len(ends_W):
        last = max(window + 1, int(np.searchsorted(ends_W, first + _WINDOW_TOKENS, side="right")))
        stop = int(ends_W[last - 1])
        window_T = np.repeat(np.arange(last - window), np.diff(ends_W[window:last], prepend=first))
        block_T = slice(first, stop)
        triple_T = ids_T[block_T].astype(np.uint64)
        triple_T |= before_T[block_T].astype(np.uint64) << np.uint64(_ID_BITS)
        before_before_T = np.concatenate([[before_T[first - 1]], before_T[block_T][:-1]]).astype(np.uint64)
        before_before_T[before_T[block_T] == start] = start
        triple_T |= before_before_T << np.uint64(2 * _ID_BITS)
        yield _Block(first, window_T, ids_T[block_T], before_T[block_T], triple_T)
        window, first = last, stop


def _slot(keys: Hashes, table_N: Counts) -> Int64s:
    """Hash keys to indices of a table whose size is a power of two, by multiplication (Knuth 1973)."""
    bits = (len(table_N) - 1).bit_length()
    return ((keys * _MULTIPLIERS[0]) >> np.uint64(64 - bits)).view(np.int64)
