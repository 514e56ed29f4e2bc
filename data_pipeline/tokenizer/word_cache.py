"""Encodes text word by word. Each word is encoded once and stored, which gives the same ids several times as fast.

Byte-pair encoding merges two neighbours only if the result is a piece (Sennrich et al. 2016). A word is the text between two places
where the neighbouring characters are neighbours in no piece. This is not exact for unigram models, which choose by a sum over the
whole text. For byte-level models, `byte_level` gives the places.

Words of up to 15 bytes, more than 19 in 20, are found with NumPy: a word and its length are two 64-bit numbers.

Shape suffixes: N bytes, W words, T ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

_BLOCK_BYTES = 1 << 16  # the arrays of one block fit in the processor's cache
_KEY_BYTES = 16  # the last holds the length
_SLOTS_PER_WORD = 2
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_LOW_MASKS = np.array([(1 << 8 * min(length, 8)) - 1 for length in range(_KEY_BYTES)], np.uint64)
_HIGH_MASKS = np.array([(1 << 8 * max(length - 8, 0)) - 1 for length in range(_KEY_BYTES)], np.uint64)
_NO_WORD = -1


def places_to_cut(pieces: Iterable[str], space_mark: str, spaces: Sequence[str]) -> Bools:
    """Return a table by `first | second << 8`: True where a cut is in no piece. It forbids some others without need."""
    may_cut = np.ones((256, 256), np.bool_)
    may_cut[0x80:0xC0] = False  # inside a character
    for first, second in {pair for piece in pieces for pair in pairwise(piece)}:
        for before in spaces if first == space_mark else (first,):
            for after in spaces if second == space_mark else (second,):
                may_cut[after.encode()[0], before.encode()[-1]] = False
    return may_cut.reshape(-1)


def join_texts(texts: Sequence[str]) -> tuple[bytes, Int64s]:
    data = [text.encode() for text in texts]
    return b"".join(data), np.cumsum(np.fromiter(map(len, data), np.int64, len(data)))


class WordCache:
    """Words with their ids, up to a bound. A full cache is emptied. The content of the cache does not change results."""

    def __init__(
        self,
        may_cut: Bools,
        encode_words: Callable[[list[bytes]], list[Int32s]],
        max_words: int = 1 << 18,
        max_ids: int = 1 << 21,
    ) -> None:
        """Both bounds must be at least 65536, the most that one block of text can have."""
        self._may_cut = may_cut
        self._encode_words = encode_words
        self._bits = (max_words * _SLOTS_PER_WORD - 1).bit_length()
        self._slots = np.full(1 << self._bits, _NO_WORD, np.int32)
        self._low_W: Words = np.empty(max_words, np.uint64)
        self._high_W: Words = np.empty(max_words, np.uint64)
        self._starts_W: Int32s = np.empty(max_words, np.int32)
        self._counts_W: Int32s = np.empty(max_words, np.int32)
        self._ids_T: Int32s = np.empty(max_ids, np.int32)
        self._long_words: dict[bytes, int] = {}
        self._num_words = self._num_ids = 0

    def encode(self, data: bytes, cuts: Int64s, ends: Int64s) -> tuple[Int32s, Int64s]:
        """Return the ids, and the number of ids before each of `ends`. `cuts` and `ends` are sorted; `ends` are among the cuts."""
        ids: list[Int32s] = []
        ids_before = np.zeros(len(ends), np.int64)
        position = num_ids = 0
        while position < len(data):
            starts_W, stop = self._words_from(data, position, cuts)
            if len(starts_W) == 1 and stop - position > _BLOCK_BYTES:
                [block_T] = self._encode_words([data[position:stop]])
                ends_W = np.array([len(block_T)])
            else:
                words_W = self._find(data[position:stop], starts_W)
                counts_W = self._counts_W[words_W]
                ends_W = np.cumsum(counts_W, dtype=np.int64)
                places_T = np.repeat(self._starts_W[words_W] - (ends_W - counts_W), counts_W)
                places_T += np.arange(len(places_T))
                block_T = self._ids_T[places_T]
            first, last = np.searchsorted(ends, (position, stop), side="right")
            words = np.searchsorted(starts_W, ends[first:last] - position)
            ids_before[first:last] = num_ids + ends_W[words - 1]
            ids.append(block_T)
            num_ids += len(block_T)
            position = stop
        return np.concatenate(ids) if ids else np.empty(0, np.int32), ids_before

    def _words_from(self, data: bytes, position: int, cuts: Int64s) -> tuple[Int64s, int]:
        """Return the starts of the next words, relative to `position`, and the end of the last: a full block, or one huge word."""
        length = _BLOCK_BYTES
        while True:
            stop = min(position + length, len(data))
            pairs = np.ndarray(stop - position - (stop == len(data)), "<u2", data, position, (1,))
            is_cut = self._may_cut[pairs]
            first, last = np.searchsorted(cuts, (position + 1, position + 1 + len(pairs)))
            is_cut[cuts[first:last] - position - 1] = True
            borders = np.flatnonzero(is_cut) + 1
            if stop == len(data):
                borders = np.append(borders, stop - position)
            if length > _BLOCK_BYTES and len(borders):
                return np.zeros(1, np.int64), position + int(borders[0])
            if len(borders):
                return np.concatenate([[0], borders[:-1]]), position + int(borders[-1])
            length *= 2

    def _find(self, block: bytes, starts_W: Int64s) -> Int32s:
        lengths_W = np.diff(starts_W, append=len(block))
        # A key is the first 15 bytes of a word and its length, which distinguishes trailing NUL bytes, as two numbers.
        at_N: Words = np.ndarray(len(block) + 8, "<u8", block + bytes(_KEY_BYTES), 0, (1,))
        shown_W = np.minimum(lengths_W, _KEY_BYTES - 1)
        low_W = at_N[starts_W] & _LOW_MASKS[shown_W]
        high_W = at_N[starts_W + 8] & _HIGH_MASKS[shown_W] | shown_W.astype(np.uint64) << np.uint64(56)
        is_long_W = lengths_W >= _KEY_BYTES
        words_W = self._look_up(low_W, high_W)
        for index in np.flatnonzero(is_long_W).tolist():
            start = starts_W[index]
            words_W[index] = self._long_words.get(block[start : start + lengths_W[index]], _NO_WORD)
        missed = np.flatnonzero(words_W == _NO_WORD)
        if not len(missed):
            return words_W
        starts = starts_W[missed]
        texts = [block[start:end] for start, end in zip(starts.tolist(), (starts + lengths_W[missed]).tolist(), strict=True)]
        new = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        ids = self._encode_words(list(new))
        if self._num_words + len(ids) > len(self._low_W) or self._num_ids + sum(map(len, ids)) > len(self._ids_T):
            self._slots.fill(_NO_WORD)
            self._long_words.clear()
            self._num_words = self._num_ids = 0
            return self._find(block, starts_W)
        place_W = np.array([self._num_words + new[text] for text in texts], np.int32)
        words_W[missed] = place_W
        added = slice(self._num_words, self._num_words + len(ids))
        counts = np.fromiter(map(len, ids), np.int32, len(ids))
        ends = self._num_ids + np.cumsum(counts)
        self._counts_W[added], self._starts_W[added] = counts, ends - counts
        self._ids_T[self._num_ids : ends[-1]] = np.concatenate(ids)
        self._num_words, self._num_ids = added.stop, int(ends[-1])
        is_short = ~is_long_W[missed]
        places, first = np.unique(place_W[is_short], return_index=True)
        self._insert(places, low_W[missed][is_short][first], high_W[missed][is_short][first])
        self._long_words |= {text: self._num_words - len(new) + number for text, number in new.items() if len(text) >= _KEY_BYTES}
        return words_W

    def _slots_of(self, low_W: Words, high_W: Words) -> Int64s:
        hashes = (low_W ^ (high_W * _MULTIPLIERS[1])) * _MULTIPLIERS[0]
        hashes ^= hashes >> np.uint64(32)
        hashes *= _MULTIPLIERS[1]
        return (hashes >> np.uint64(64 - self._bits)).astype(np.int64)

    def _look_up(self, low_W: Words, high_W: Words) -> Int32s:
        """Return the words of these keys, or `_NO_WORD`, by open addressing with one step for all keys at a time."""
        slots = self._slots_of(low_W, high_W)
        words_W = self._slots[slots]
        differs = (self._low_W[words_W] != low_W) | (self._high_W[words_W] != high_W)
        open_ = np.flatnonzero(differs & (words_W != _NO_WORD))
        while len(open_):
            slots[open_] = (slots[open_] + 1) & (len(self._slots) - 1)
            found = self._slots[slots[open_]]
            words_W[open_] = found
            differs = (self._low_W[found] != low_W[open_]) | (self._high_W[found] != high_W[open_])
            open_ = open_[differs & (found != _NO_WORD)]
        return words_W

    def _insert(self, words: Int32s, low: Words, high: Words) -> None:
        """Assign slots to new words. Of several words for one slot, the last written keeps it and the others try the next slot."""
        self._low_W[words], self._high_W[words] = low, high
        slots = self._slots_of(low, high)
        while len(words):
            free = self._slots[slots] == _NO_WORD
            self._slots[slots[free]] = words[free]
            left = self._slots[slots] != words
            words, slots = words[left], (slots[left] + 1) & (len(self._slots) - 1)
