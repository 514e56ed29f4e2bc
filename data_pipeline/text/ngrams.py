from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# ruff: noqa: N815 - names of arrays carry their shape

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]
Hashes = NDArray[np.uint64]
HASH_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class NGrams:
    """Every run of n words that lies within one text."""

    n: int
    hashes_G: Hashes
    first_words_G: Int64s  # the index of each run's first word among all words of the batch
    borders_D1: Int64s


def ngrams_of(word_hashes_W: Hashes, words_D1: Int64s, n: int) -> NGrams:
    """Return all runs of `n` words, in the order of their first words. A text with fewer words has none."""
    counts_D = np.maximum(np.diff(words_D1) - n + 1, 0)
    borders_D1 = np.concatenate([[0], np.cumsum(counts_D)])
    first_G = np.arange(borders_D1[-1]) + np.repeat(words_D1[:-1] - borders_D1[:-1], counts_D)
    hashes_G = word_hashes_W[first_G]
    for distance in range(1, n):
        hashes_G = hashes_G * np.uint64(HASH_MULTIPLIER) + word_hashes_W[first_G + distance]
    return NGrams(n, mix_hashes(hashes_G) if n > 1 else hashes_G, first_G, borders_D1)


def mix_hashes(hashes: Hashes) -> Hashes:
    """Mix the bits of each hash by the finaliser of splitmix64 (Steele, Lea and Flood, 2014), which is a bijection."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def runs_of(is_inside_N: Bools) -> tuple[Int64s, Int64s]:
    """Return the start and end of each run of true values. The last value must be false."""
    borders = np.flatnonzero(np.diff(is_inside_N, prepend=False))
    return borders[::2], borders[1::2]
