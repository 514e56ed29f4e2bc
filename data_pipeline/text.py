"""Several texts in one array of bytes, with their words, lines and repeated items: the input of all vectorised measures.

A word is a run of letters, digits, `_`, `'` and bytes of other scripts, without the punctuation of Latin-1, of General Punctuation
and of CJK. A character of a script that writes no spaces (Thai, Lao, Tibetan, Burmese, Khmer, and all from U+3000 on: Chinese,
Japanese, Korean, …) is a word by itself. Words are compared by a 64-bit hash that ignores the case of ASCII letters.

Shape suffixes: N bytes of all texts, D texts, W their words, T their tokens (runs between white space), K their lines, G their
n-grams, I items of any sort, R repeats. A name with `_D1` holds D + 1 borders: text d owns the items [border[d], border[d + 1]).
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]
Hashes = NDArray[np.uint64]
HASH_MULTIPLIER = 0x9E3779B97F4A7C15
_HASH_BLOCK_BYTES = 1 << 15  # the arrays of one block, 8 bytes per byte of text, fit in the cache
_HASHED_WORD_BYTES = 1 << 12  # of a longer word, only these are hashed
_INVERSE = pow(HASH_MULTIPLIER, -1, 1 << 64)


_VALUE_OF_BYTE = np.frombuffer(b"".join(hashlib.sha256(bytes([byte])).digest()[:8] for byte in range(256)), np.uint64).copy()
_VALUE_OF_BYTE[ord("A") : ord("Z") + 1] = _VALUE_OF_BYTE[ord("a") : ord("z") + 1]
_IS_WORD_BYTE = np.array([byte >= 0x80 or chr(byte).isalnum() or chr(byte) in "_'" for byte in range(256)])
_IS_SPACE = np.isin(np.arange(256), list(string.whitespace.encode()))


def _powers(base: int, count: int) -> Hashes:
    """Return 1, base, base², … modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


_POWERS = _powers(HASH_MULTIPLIER, _HASH_BLOCK_BYTES + _HASHED_WORD_BYTES)
_INVERSE_POWERS = _powers(_INVERSE, _HASH_BLOCK_BYTES + _HASHED_WORD_BYTES)


@dataclass(frozen=True)
class NGrams:
    """Every run of n words that lies within one text."""

    n: int
    hashes_G: Hashes
    first_words_G: Int64s  # the index of each run's first word among all words of the batch
    borders_D1: Int64s


class TextBatch:
    """Expensive properties are computed at their first use."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """The texts are valid UTF-8."""
        self.bytes_N: Bytes = np.frombuffer(b"\n".join([*texts, b""]), np.uint8)
        """All texts. Each is followed by a newline that is not part of it, so no word or line continues in the next text."""
        self.starts_D: Int64s
        self.ends_D: Int64s
        lengths_D = np.fromiter((len(text) for text in texts), np.int64, len(texts))
        self.ends_D = np.cumsum(lengths_D + 1) - 1
        self.starts_D = self.ends_D - lengths_D

    def __len__(self) -> int:
        return len(self.ends_D)

    @cached_property
    def is_ascii(self) -> bool:
        return not len(self.bytes_N) or int(self.bytes_N.max()) < 0x80

    @cached_property
    def _words(self) -> tuple[Int64s, Int64s, Bools]:
        is_word_N = _IS_WORD_BYTE[self.bytes_N]
        if self.is_ascii:
            starts_W, ends_W = runs_of(is_word_N)
            return starts_W, ends_W, is_word_N
        is_start_N = _mark_other_scripts(self.bytes_N, is_word_N)
        is_start_N[1:] |= ~is_word_N[:-1]
        is_start_N[:1] = True
        is_start_N &= is_word_N
        is_end_N = is_word_N[:-1] & (~is_word_N[1:] | is_start_N[1:])
        return np.flatnonzero(is_start_N), np.flatnonzero(is_end_N) + 1, is_word_N

    @property
    def is_word_N(self) -> Bools:
        return self._words[2]

    @property
    def word_starts_W(self) -> Int64s:
        """Index of each word's first byte in `bytes_N`."""
        return self._words[0]

    @property
    def word_ends_W(self) -> Int64s:
        return self._words[1]

    @cached_property
    def words_D1(self) -> Int64s:
        return np.append(np.searchsorted(self.word_starts_W, self.starts_D), len(self.word_starts_W))

    @cached_property
    def word_hashes_W(self) -> Hashes:
        """A hash of the first 4096 bytes of each word, which ignores the case of ASCII letters.

        It is a polynomial in the byte values, from sums over a block of words. The multiplier is odd, so it is invertible.
        """
        ends_W = np.minimum(self.word_ends_W, self.word_starts_W + _HASHED_WORD_BYTES)
        hashes_W = np.empty(len(ends_W), np.uint64)
        room = np.empty(_HASH_BLOCK_BYTES + _HASHED_WORD_BYTES + 1, np.uint64)
        first = 0
        while first < len(ends_W):
            begin = self.word_starts_W[first]
            last = int(np.searchsorted(self.word_starts_W, begin + _HASH_BLOCK_BYTES))
            block_N = self.bytes_N[begin : ends_W[last - 1]]
            sums_N1 = room[: len(block_N) + 1]
            sums_N1[0] = 0
            terms_N = sums_N1[1:]
            np.take(_VALUE_OF_BYTE, block_N, out=terms_N, mode="clip")
            terms_N *= _POWERS[: len(block_N)]
            np.cumsum(terms_N, out=terms_N)
            starts = self.word_starts_W[first:last] - begin
            sums = sums_N1[ends_W[first:last] - begin] - sums_N1[starts]
            hashes_W[first:last] = mix_hashes(sums * _INVERSE_POWERS[starts])
            first = last
        return hashes_W

    @cached_property
    def tokens_T(self) -> tuple[Int64s, Int64s]:
        """The start and end of each run of characters other than ASCII white space."""
        return runs_of(~_IS_SPACE[self.bytes_N])

    @cached_property
    def _lines(self) -> tuple[Int64s, Int64s]:
        ends_K = np.flatnonzero(self.bytes_N == ord("\n"))
        return np.concatenate([[0], ends_K[:-1] + 1]).astype(np.int64)[: len(ends_K)], ends_K

    @property
    def line_starts_K(self) -> Int64s:
        """Index of each line's first byte. Empty lines count."""
        return self._lines[0]

    @property
    def line_ends_K(self) -> Int64s:
        return self._lines[1]

    @cached_property
    def lines_D1(self) -> Int64s:
        return np.append(np.searchsorted(self.line_starts_K, self.starts_D), len(self.line_starts_K))

    def hash_of_spans(self, starts: Int64s, ends: Int64s) -> Hashes:
        """Return a hash of the words that begin in each range of bytes, in their order; 0 if there is none."""
        return self.hash_of_words(np.searchsorted(self.word_starts_W, starts), np.searchsorted(self.word_starts_W, ends))

    @cached_property
    def _characters_before_N1(self) -> NDArray[np.int32]:
        is_first_byte_N = (self.bytes_N & 0xC0) != 0x80
        before_N1 = np.zeros(len(is_first_byte_N) + 1, np.int32)
        np.cumsum(is_first_byte_N, out=before_N1[1:])
        return before_N1

    def count_characters(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Return the number of characters (code points) in each range of bytes."""
        if self.is_ascii:
            return ends - starts
        before_N1 = self._characters_before_N1
        return (before_N1[ends] - before_N1[starts]).astype(np.int64)

    @cached_property
    def _sums_of_hashes(self) -> tuple[Hashes, Hashes]:
        """The sums of hash(word) * M**place over all words before each word, and M**-place; modulo 2**64, for an odd M."""
        num_words = len(self.word_hashes_W)
        sums_W1 = np.zeros(num_words + 1, np.uint64)
        np.cumsum(self.word_hashes_W * _powers(HASH_MULTIPLIER, num_words), out=sums_W1[1:])
        return sums_W1, _powers(_INVERSE, num_words + 1)

    def hash_of_words(self, first: Int64s, last: Int64s) -> Hashes:
        """Return a hash of each run [first, last): a polynomial in the words' hashes, so order counts; 0 if empty."""
        count = (last - first).astype(np.uint64)
        sums_W1, inverse_powers_W1 = self._sums_of_hashes
        polynomial = (sums_W1[last] - sums_W1[first]) * inverse_powers_W1[first]
        return np.where(count == 0, np.uint64(0), mix_hashes(polynomial + count))

    def ngrams(self, n: int) -> NGrams:
        """Return all runs of `n` words, in the order of their first words. A text with fewer words has none."""
        return ngrams_of(self.word_hashes_W, self.words_D1, n)


def writes_no_spaces(lead: Bytes, second: Bytes) -> Bools:
    """Return whether each character belongs to a script without spaces, from the first two bytes of its UTF-8."""
    is_thai_lao_tibetan = (lead == 0xE0) & (second >= 0xB8)
    is_burmese_khmer = (lead == 0xE1) & ((second <= 0x81) | (second == 0x9E) | (second == 0x9F))
    writes_none: Bools = ((lead >= 0xE3) & (lead <= 0xED)) | is_thai_lao_tibetan | is_burmese_khmer
    return writes_none


def _mark_other_scripts(bytes_N: Bytes, is_word_N: Bools) -> Bools:
    """Clear non-ASCII punctuation in `is_word_N`. Return where characters that are words by themselves begin and end."""
    is_border_N = np.zeros(len(bytes_N), np.bool_)
    leads = np.flatnonzero(bytes_N >= 0xC2)  # never the last byte, which is a newline
    lead, second = bytes_N[leads], bytes_N[leads + 1]
    is_separator = (lead == 0xC2) | ((lead == 0xE2) & (second <= 0x81)) | ((lead == 0xE3) & (second == 0x80))
    length = 1 + (lead >= 0xC2) + (lead >= 0xE0) + (lead >= 0xF0)
    for distance in range(4):
        is_word_N[leads[is_separator & (distance < length)] + distance] = False
    stands_alone = writes_no_spaces(lead, second) & ~is_separator
    is_border_N[leads[stands_alone]] = True
    is_border_N[leads[stands_alone] + length[stands_alone]] = True
    return is_border_N


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


# One sort of hashes with places groups equal items. A batch of 1 MB leaves 45 bits of each: one in a thousand batches has a clash.
def _sorted_candidates(hashes_I: Hashes, borders_D1: Int64s) -> tuple[Hashes, int]:
    """Return the sorted keys of all items that may occur twice, and the number of low bits that hold the place."""
    salts_D = mix_hashes(~np.arange(len(borders_D1) - 1, dtype=np.uint64))
    salted_I = hashes_I ^ np.repeat(salts_D, np.diff(borders_D1))
    # Only items that share a slot of a hash table with another item may occur twice and need to be sorted.
    slot_bits = max(len(salted_I).bit_length() + 1, 8)
    slots_I = (salted_I >> np.uint64(64 - slot_bits)).astype(np.intp)
    numbers_I = np.arange(len(salted_I), dtype=np.int32)
    winners = np.empty(1 << slot_bits, np.int32)
    winners[slots_I] = numbers_I
    winner_I = winners[slots_I]
    is_shared_I = winner_I != numbers_I
    is_shared_I[winner_I[is_shared_I]] = True
    places = np.flatnonzero(is_shared_I)
    place_bits = len(hashes_I).bit_length()
    mask = np.uint64((1 << place_bits) - 1)
    return np.sort((salted_I[places] & ~mask) | places.astype(np.uint64)), place_bits


def _equals_previous(keys: Hashes, place_bits: int) -> Bools:
    equal = np.zeros(len(keys), np.bool_)
    equal[1:] = (keys[1:] >> np.uint64(place_bits)) == (keys[:-1] >> np.uint64(place_bits))
    return equal


def _places(keys: Hashes, place_bits: int) -> Int64s:
    return (keys & np.uint64((1 << place_bits) - 1)).astype(np.int64)
