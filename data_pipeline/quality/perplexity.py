"""What a text is like, judged from its token ids: its perplexity under a reference model, and who is dropped for it.

The model works on pairs and triples of pieces, so that letters without sense cost what they should: a model of words knows none of
them, and takes all for one and the same unknown word. It is small enough to be trained anew in every preparation.

A score is made of integers, and of float64 operations that IEEE 754 defines to the last bit (+, *, /) in a fixed order; no
logarithm is taken where a document is judged. So a document has the same score on every machine, and in any company.

The reference model counts single pieces, pairs and triples, and backs off with a Dirichlet prior (MacKay and Peto 1995):

    p(c) = (n(c) + 1/V) / (n + 1)
    p(c | b) = (n(bc) + m2 p(c)) / (n(b) + m2)
    p(c | ab) = (n(abc) + m3 p(c | b)) / (n(ab) + m3)

Pairs and triples share 2**bits counters, by hash. A counter that others share is too high, but never higher than that of the same
context, which bounds it. A token that ends nine which stood in the same order before in the document counts as half expected,
whatever the model says (a cache model, Kuhn and De Mori 1990): so text that repeats itself has a low perplexity, however odd it is.

Shape suffixes: T token ids of all texts, D texts, N counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import QualitySettings
from data_pipeline.text.ngrams import mix_hashes

# ruff: noqa: N815 - names of arrays carry their shape

__all__ = ["ReferenceModel", "count_scores", "perplexity", "train_reference"]

Ids = NDArray[np.int32]
Int64s = NDArray[np.int64]
Counts = NDArray[np.uint32]
Keys = NDArray[np.uint64]
Scores = NDArray[np.uint16]
SCORE_STEPS = 256
"""A perplexity score is the mean of -log2 p over the tokens of a text, in steps of 1/256 bit."""
MAX_SCORE = 0xFFFF
_ID_BITS = 21
_PAIR_PRIOR, _TRIPLE_PRIOR = 64.0, 8.0  # m2 and m3; of 1 to 1000 those with the lowest perplexity on held-out prose, November 2026
_WINDOW_TOKENS = 1 << 16  # in which a triple is recognised; the arrays of one window stay in the processor's cache
_MULTIPLIERS = tuple(np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xCA5A826395121157))
_TOKEN_STEPS = 1024  # of the cost of one token, per bit
_MIN_EXPONENT = -63
_MANTISSA_BITS = 10


def _cost_table() -> NDArray[np.int32]:
    """-log2 p in 1/1024 bit by the exponent and the first ten bits of the mantissa of p, from 2**-63 to 1."""
    steps = np.arange(-_MIN_EXPONENT << _MANTISSA_BITS)
    exponents, mantissas = np.divmod(steps, 1 << _MANTISSA_BITS)
    middle = 1 + (mantissas + 0.5) / (1 << _MANTISSA_BITS)
    return np.append(np.rint(-_TOKEN_STEPS * (exponents + _MIN_EXPONENT + np.log2(middle))), 0).astype(np.int32)


_COSTS = _cost_table()


@dataclass(frozen=True)
class ReferenceModel:
    """Counts of pieces, pairs and triples in trusted text."""

    singles_V: Counts
    """The last is that of the start of a text, which is a context only."""
    pairs_N: Counts
    triples_N: Counts

    def merged(self, other: ReferenceModel) -> ReferenceModel:
        """The model of both texts together."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ReferenceModel(*(mine + its for mine, its in pairs))

    def to_bytes(self) -> bytes:
        """The model in the safetensors format."""
        return save(dict(vars(self)))

    @staticmethod
    def from_bytes(data: bytes) -> ReferenceModel:
        """The model that `to_bytes` wrote.

        Raises:
            PreparedDataError: this is none.
        """
        try:
            return ReferenceModel(**load(data))
        except (SafetensorError, TypeError) as error:
            raise PreparedDataError(f"reference model: {error}; delete the work folder and run `prepare` again") from None

    def score(self, ids_T: Ids, ends_D: Int64s) -> Scores:
        """How surprising each text is to the model, in steps of 1/256 bit per token; 0 for an empty text."""
        counts_V = self.singles_V[:-1].astype(np.float64)
        singles_V = (counts_V + 1.0 / self._start) / (counts_V.sum() + 1.0)
        totals_T1 = np.zeros(len(ids_T) + 1, np.int64)
        count_before = 0
        for block in _blocks(ids_T, ends_D, self._start):
            p_T, count_before = self._probability(block, singles_V, count_before)
            repeats = block.repeats()
            p_T[repeats] = 0.5 * (p_T[repeats] + 1.0)
            totals_T1[block.first + 1 : block.first + 1 + len(p_T)] = _COSTS[_cost_index(p_T)]
        np.cumsum(totals_T1, out=totals_T1)
        sums_D = np.diff(totals_T1[ends_D], prepend=0)
        steps_D = np.maximum(np.diff(ends_D, prepend=0), 1) * (_TOKEN_STEPS // SCORE_STEPS)
        scores_D: Scores = np.minimum((sums_D + steps_D // 2) // steps_D, MAX_SCORE).astype(np.uint16)
        return scores_D

    @property
    def _start(self) -> int:
        """The id that stands before the first token; there is none as high."""
        return len(self.singles_V) - 1

    def _probability(self, block: _Block, singles_V: NDArray[np.float64], count_before: int) -> tuple[NDArray[np.float64], int]:
        """p(c | ab) of every token by the formulas above, and the count of the last pair, which the next block asks for."""
        count_b = self.singles_V[block.before_T]
        count_bc = np.minimum(self.pairs_N[_slot(block.pair_T, self.pairs_N)], count_b)
        count_ab = np.concatenate([[count_before], count_bc[:-1]]).astype(np.uint32)
        count_ab[block.before_T == self._start] = self.singles_V[self._start]
        count_abc = np.minimum(self.triples_N[_slot(block.triple_T, self.triples_N)], np.minimum(count_ab, count_bc))
        p_T = (count_bc + _PAIR_PRIOR * singles_V[block.ids_T]) / (count_b + _PAIR_PRIOR)
        p_T *= _TRIPLE_PRIOR
        p_T += count_abc
        p_T /= count_ab + _TRIPLE_PRIOR
        return p_T, int(count_bc[-1])


def train_reference(batches: Iterable[tuple[Ids, Int64s]], vocab_size: int, settings: QualitySettings) -> ReferenceModel:
    """The model of a trusted source, from batches of its token ids and the ends of its texts, up to `reference_tokens`.

    Raises:
        ConfigError: there is no text to train on, or the vocabulary is too large to pack three ids into 63 bits.
    """
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
        raise ConfigError(
            f"quality.trusted = {settings.trusted}: no document of this source is kept for training within "
            f"{settings.reference_tokens} tokens; name another source, or raise quality.reference_tokens"
        )
    return ReferenceModel(singles_V, pairs_N, triples_N)


def perplexity(score: float) -> float:
    """The perplexity per token that a score stands for."""
    return float(2.0 ** (score / SCORE_STEPS))


def count_scores(scores_D: Scores) -> dict[str, int]:
    """How many texts have each score."""
    values, counts = np.unique(scores_D, return_counts=True)
    return {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


@dataclass(frozen=True)
class _Block:
    """Some tokens with what stands before each of them."""

    first: int
    """Place of its first token among all tokens."""
    window_T: Int64s
    ids_T: Ids
    before_T: Ids
    """The token before each, or the start of the text."""
    triple_T: Keys
    """Each token and the two before it, as one number."""

    @property
    def pair_T(self) -> Keys:  # noqa: N802
        """Each token and the one before it, as one number."""
        return self.triple_T & np.uint64((1 << 2 * _ID_BITS) - 1)

    def repeats(self) -> Int64s:
        """Places of the tokens that end a run of nine which occurs earlier in the window.

        In each round, every run left asks for a slot, and the first to ask has it. Those that find a run like theirs there are
        repeats; those that find another ask again, by another hash.
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
    """The tokens in blocks of whole windows; a window is up to `_WINDOW_TOKENS` of one text, counted from its first."""
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
        yield _Block(first, window_T, ids_T[block_T], before_T[block_T], _triples(ids_T, before_T, block_T, start))
        window, first = last, stop


def _triples(ids_T: Ids, before_T: Ids, block_T: slice, start: int) -> Keys:
    first = block_T.start
    triple_T = ids_T[block_T].astype(np.uint64)
    triple_T |= before_T[block_T].astype(np.uint64) << np.uint64(_ID_BITS)
    before_before_T = np.concatenate([[before_T[first - 1]], before_T[block_T][:-1]]).astype(np.uint64)
    before_before_T[before_T[block_T] == start] = start
    triple_T |= before_before_T << np.uint64(2 * _ID_BITS)
    return triple_T


def _slot(keys: Keys, table_N: Counts) -> Int64s:
    """Multiplicative hashing (Knuth 1973) into a table whose size is a power of two."""
    bits = (len(table_N) - 1).bit_length()
    return ((keys * _MULTIPLIERS[0]) >> np.uint64(64 - bits)).view(np.int64)


def _cost_index(p_T: NDArray[np.float64]) -> Int64s:
    """Places in the table of costs, read from the bits of the numbers, which are exponent and mantissa."""
    bits_T = np.clip(p_T, 2.0**_MIN_EXPONENT, 1.0).view(np.int64)
    return (bits_T >> (52 - _MANTISSA_BITS)) - ((1023 + _MIN_EXPONENT) << _MANTISSA_BITS)
