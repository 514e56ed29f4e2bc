"""Repeated words, runs of words, lines or paragraphs of many texts at once, from the hashes of these items.

One sort of hashes with places groups equal items. A batch of 1 MB leaves 45 bits of each: one in a thousand batches has a clash.

Shape suffixes: D texts, I items, W words, R repeats. Text d owns the items from `borders_D1[d]` to `borders_D1[d + 1]`.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text.ngrams import NGrams, mix_hashes

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class TopItems:
    """The commonest item of each text. Of several with the same count, it is the first."""

    counts_D: Int64s  # number of its occurrences; 0 if no item of the text occurs twice
    first_D: Int64s  # index of its first occurrence among the items of all texts; 0 if no item occurs twice


def find_repeats(hashes_I: Hashes, borders_D1: Int64s) -> Int64s:
    """Return the indices of the items that equal an earlier item of the same text, in ascending order."""
    keys, place_bits = _sorted_candidates(hashes_I, borders_D1)
    is_repeat = _equals_previous(keys, place_bits)
    return np.sort(_places(keys, place_bits)[is_repeat])


def top_items(hashes_I: Hashes, borders_D1: Int64s) -> TopItems:
    """Return the commonest item of each text, if one occurs at least twice."""
    keys, place_bits = _sorted_candidates(hashes_I, borders_D1)
    starts = np.flatnonzero(~_equals_previous(keys, place_bits))
    counts = np.diff(starts, append=len(keys))
    first = _places(keys, place_bits)[starts]
    first, counts = first[counts > 1], counts[counts > 1]
    text = np.searchsorted(borders_D1, first, side="right") - 1
    order = np.lexsort((first, -counts, text))
    texts, best = np.unique(text[order], return_index=True)
    top = TopItems(np.zeros(len(borders_D1) - 1, np.int64), np.zeros(len(borders_D1) - 1, np.int64))
    top.counts_D[texts] = counts[order[best]]
    top.first_D[texts] = first[order[best]]
    return top


def words_in_repeats(ngrams: NGrams, num_words: int) -> Bools:
    """Return for each of the `num_words` words whether it is in an n-gram that equals an earlier one of its text."""
    first_R = ngrams.first_words_G[find_repeats(ngrams.hashes_G, ngrams.borders_D1)]
    steps = np.zeros(num_words + 1, np.int8)
    steps[first_R] += 1  # each word begins at most one n-gram, so no index occurs twice
    steps[first_R + ngrams.n] -= 1
    covered_W: Bools = np.cumsum(steps[:-1], dtype=np.int8) > 0
    return covered_W


def _sorted_candidates(hashes_I: Hashes, borders_D1: Int64s) -> tuple[Hashes, int]:
    """Return the sorted keys of all items that may occur twice, and the number of low bits that hold the place."""
    salts_D = mix_hashes(~np.arange(len(borders_D1) - 1, dtype=np.uint64))
    salted_I = hashes_I ^ np.repeat(salts_D, np.diff(borders_D1))
    places = _sharing_a_slot(salted_I)
    place_bits = len(hashes_I).bit_length()
    mask = np.uint64((1 << place_bits) - 1)
    return np.sort((salted_I[places] & ~mask) | places.astype(np.uint64)), place_bits


def _sharing_a_slot(salted_I: Hashes) -> Int64s:
    """Return the items that share a slot of a hash table with another item: only these may occur twice and need to be sorted."""
    slot_bits = max(len(salted_I).bit_length() + 1, 8)
    slots_I = (salted_I >> np.uint64(64 - slot_bits)).astype(np.intp)
    numbers_I = np.arange(len(salted_I), dtype=np.int32)
    winners = np.empty(1 << slot_bits, np.int32)
    winners[slots_I] = numbers_I
    winner_I = winners[slots_I]
    is_shared_I = winner_I != numbers_I
    is_shared_I[winner_I[is_shared_I]] = True
    return np.flatnonzero(is_shared_I)


def _equals_previous(keys: Hashes, place_bits: int) -> Bools:
    equal = np.zeros(len(keys), np.bool_)
    equal[1:] = (keys[1:] >> np.uint64(place_bits)) == (keys[:-1] >> np.uint64(place_bits))
    return equal


def _places(keys: Hashes, place_bits: int) -> Int64s:
    return (keys & np.uint64((1 << place_bits) - 1)).astype(np.int64)
