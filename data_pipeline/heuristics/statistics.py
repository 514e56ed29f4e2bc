"""Statistics of the texts of a batch, of which the rules are made. The papers of the rules leave these choices open:

- A **word** is a word of `TextBatch`: it has no punctuation, and in scripts without spaces each character is a word.
- **Lines** and **paragraphs** count if they have a word. They are equal if their words are equal; case and punctuation are ignored.
- The characters of a **duplicate** item are those of its second and later occurrences, each character once, over all characters.
  For runs of words, only the characters of words count, and overlapping duplicates count as their union.
- The characters of the **commonest** run of words are those from its first to its last word, times its occurrences. A run that
  occurs once does not count.

Shape suffixes: N bytes of all texts, D texts, W words, T tokens (runs between white space), K all lines, L lines with a word,
I any items.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text import (
    Bools,
    Int64s,
    TextBatch,
    find_repeats,
    ngrams_of,
    runs_of,
    top_items,
    words_in_repeats,
    writes_no_spaces,
)

Floats = NDArray[np.float64]


def _table(characters: str) -> Bools:
    return np.isin(np.arange(256), list(characters.encode("ascii")))


_IS_SENTENCE_END = _table(".?!")
_MAY_FOLLOW_SENTENCE = _table(string.whitespace + "\"')]") | (np.arange(256) >= 0x80)  # such as the quotes of most languages


@dataclass(frozen=True, slots=True)
class Spans:
    starts: Int64s
    ends: Int64s
    borders_D1: Int64s
    repeats: Int64s  # indices of the items that repeat an earlier item of the same text


class TextStatistics:
    """The statistics of the texts of a batch. Those that several rules need are computed once. `settings` are `heuristics.*`."""

    def __init__(self, batch: TextBatch, is_english_D: Bools, settings: Any) -> None:
        self.batch = batch
        self.settings = settings
        self.is_english_D = is_english_D
        self.starts_D1 = np.append(batch.starts_D, len(batch.bytes_N))
        self.chars_D = batch.count_characters(batch.starts_D, batch.ends_D)

    def share(self, part_D: Floats | Int64s, whole_D: Int64s) -> Floats:
        shares_D: Floats = part_D / np.maximum(whole_D, 1)
        return shares_D

    def borders(self, starts_I: Int64s) -> Int64s:
        return np.searchsorted(starts_I, self.starts_D1)

    def count(self, starts_I: Int64s) -> Int64s:
        """Return each text's number of the items that begin at these bytes."""
        return np.diff(self.borders(starts_I))

    def share_of_chars(self, chars_I: Int64s, starts_I: Int64s) -> Floats:
        """Return the share of each text's characters that is in items that begin at these bytes."""
        return self.share(_sums(chars_I, self.borders(starts_I)), self.chars_D)

    # Bytes and characters

    def count_bytes(self, is_counted_N: Bools) -> Int64s:
        """Return each text's number of marked bytes. The newline after the text is included."""
        counts_D: Int64s = np.add.reduceat(is_counted_N, self.batch.starts_D, dtype=np.int64)
        return counts_D

    def are_between(self, first: str, last: str) -> Bools:
        is_between_N: Bools = self.batch.bytes_N - np.uint8(ord(first)) <= ord(last) - ord(first)  # lower bytes wrap around
        return is_between_N

    def bytes_in_runs(self, is_same: Bools, least: int) -> Int64s:
        """Return each text's number of bytes in runs of at least `least` true values."""
        starts, ends = runs_of(np.append(is_same, False))
        is_long = ends - starts >= least
        return _sums((ends - starts)[is_long], self.borders(starts[is_long]))

    @cached_property
    def are_letters_N(self) -> Bools:
        return self.are_between("A", "Z") | self.are_between("a", "z")

    @cached_property
    def beyond_ascii_D(self) -> Int64s:
        return self.count_bytes(self.batch.bytes_N >= 0xC0)

    @cached_property
    def visible_D(self) -> Int64s:
        """Number of ASCII characters other than white space and control characters."""
        return self.count_bytes(self.are_between("!", "~"))

    @cached_property
    def letters_D(self) -> Int64s:
        return self.count_bytes(self.are_letters_N)

    @cached_property
    def digits_D(self) -> Int64s:
        return self.count_bytes(self.are_between("0", "9"))

    # Strings

    @cached_property
    def _lower_case(self) -> bytes:
        return self.batch.bytes_N.tobytes().lower()

    def places_of(self, *needles: str) -> Int64s:
        """Return the positions of lower-case strings, in ascending order. The case of the text's ASCII letters is ignored."""
        places = [np.fromiter(_find_all(self._lower_case, needle.encode()), np.int64) for needle in needles]
        return places[0] if len(places) == 1 else np.sort(np.concatenate(places))

    def occurrences(self, *needles: str) -> Int64s:
        return self.count(self.places_of(*needles))

    def _begin_with(self, starts_I: Int64s, needle: str) -> Bools:
        last = len(self.batch.bytes_N) - 1  # a newline, which no needle contains
        equal = [self.batch.bytes_N[np.minimum(starts_I + place, last)] == byte for place, byte in enumerate(needle.encode())]
        begins_I: Bools = np.logical_and.reduce(equal)
        return begins_I

    # Words, runs of words, and tokens

    @cached_property
    def words_D(self) -> Int64s:
        return np.diff(self.batch.words_D1)

    @cached_property
    def word_chars_W(self) -> Int64s:
        return self.batch.count_characters(self.batch.word_starts_W, self.batch.word_ends_W)

    @cached_property
    def mean_word_length_D(self) -> Floats:
        return self.share(_sums(self.word_chars_W, self.batch.words_D1), self.words_D)

    @cached_property
    def is_spaced_D(self) -> Bools:
        """Whether at least half of each text's words are not single characters of scripts without spaces."""
        if self.batch.is_ascii:
            return np.ones(len(self.batch), np.bool_)
        lead_W, second_W = self.batch.bytes_N[self.batch.word_starts_W], self.batch.bytes_N[self.batch.word_starts_W + 1]
        return 2 * _sums(writes_no_spaces(lead_W, second_W), self.batch.words_D1) <= self.words_D

    def count_word(self, word: str) -> Int64s:
        [hash_of_word] = TextBatch([word.encode()]).word_hashes_W
        return self.count(self.batch.word_starts_W[self.batch.word_hashes_W == hash_of_word])

    def count_commonest_word(self, is_counted_W: Bools) -> Int64s:
        """Return how often the commonest of these words occurs in each text; 0 if none occurs twice."""
        counted = np.flatnonzero(is_counted_W)
        return top_items(self.batch.word_hashes_W[counted], self.borders(self.batch.word_starts_W[counted])).counts_D

    def commonest_run_chars(self, size: int) -> Floats:
        ngrams = self.batch.ngrams(size)
        top = top_items(ngrams.hashes_G, ngrams.borders_D1)
        if not len(ngrams.hashes_G):
            return np.zeros(len(self.batch))
        first_D = ngrams.first_words_G[top.first_D]
        spans_D = self.batch.count_characters(self.batch.word_starts_W[first_D], self.batch.word_ends_W[first_D + size - 1])
        return self.share(top.counts_D * spans_D, self.chars_D)

    @cached_property
    def duplicate_runs_of_5(self) -> Floats:
        return self.duplicate_run_chars(5, np.ones(len(self.batch), np.bool_))

    def duplicate_run_chars(self, size: int, chosen_D: Bools) -> Floats:
        """Return the share of characters in duplicate runs of `size` words for the chosen texts, and 0 for all others."""
        chosen_W = np.flatnonzero(np.repeat(chosen_D, self.words_D))
        words_D1 = np.append(0, np.cumsum(np.where(chosen_D, self.words_D, 0)))
        covered_W = words_in_repeats(ngrams_of(self.batch.word_hashes_W[chosen_W], words_D1, size), len(chosen_W))
        return self.share(_sums(self.word_chars_W[chosen_W] * covered_W, words_D1), self.chars_D)

    def share_of_tokens(self, is_counted_N: Bools) -> Floats:
        """Return the share of each text's tokens that have a marked byte."""
        starts_T = self.batch.tokens_T[0]
        is_counted_T = np.maximum.reduceat(is_counted_N.view(np.uint8), starts_T) if len(starts_T) else starts_T
        borders_D1 = self.borders(starts_T)
        return self.share(_sums(is_counted_T, borders_D1), np.diff(borders_D1))

    def share_in_tokens_at(self, places: Int64s) -> Floats:
        starts_T, ends_T = self.batch.tokens_T
        numbers = np.unique(np.searchsorted(starts_T, places, side="right") - 1)
        starts, ends = starts_T[numbers], ends_T[numbers]
        return self.share_of_chars(self.batch.count_characters(starts, ends), starts)

    def long_tokens(self, chars: int) -> Int64s:
        """Return the first byte of each token of more than `chars` characters."""
        starts, ends = self.batch.tokens_T
        return starts[self.batch.count_characters(starts, ends) > chars]

    def sentence_ends(self, marks: str) -> Int64s:
        """Return the places of marks that end a sentence: those of ASCII before white space or a closing quote, and all others."""
        places = np.flatnonzero(_IS_SENTENCE_END[self.batch.bytes_N])
        places = places[_MAY_FOLLOW_SENTENCE[self.batch.bytes_N[places + 1]]]  # the last byte is a newline, not a mark
        if self.batch.is_ascii:
            return places
        return np.concatenate([places, self.places_of(*(mark for mark in marks if not mark.isascii()))])

    # Lines and paragraphs

    @cached_property
    def _words_in_lines_K(self) -> Int64s:
        first_K = np.searchsorted(self.batch.word_starts_W, self.batch.line_starts_K)
        return np.diff(first_K, append=len(self.batch.word_starts_W))

    @cached_property
    def words_in_lines_L(self) -> Int64s:
        return self._words_in_lines_K[self._words_in_lines_K > 0]

    @cached_property
    def lines(self) -> Spans:
        has_word_K = self._words_in_lines_K > 0
        return self._spans(self.batch.line_starts_K[has_word_K], self.batch.line_ends_K[has_word_K])

    @cached_property
    def paragraphs(self) -> Spans:
        has_word_K1 = np.append(self._words_in_lines_K > 0, False)
        opens_text_K1 = np.zeros(len(has_word_K1), np.bool_)
        opens_text_K1[self.batch.lines_D1] = True
        is_first_K = has_word_K1[:-1] & (opens_text_K1[:-1] | ~np.roll(has_word_K1, 1)[:-1])
        is_last_K = has_word_K1[:-1] & (opens_text_K1[1:] | ~has_word_K1[1:])
        return self._spans(self.batch.line_starts_K[is_first_K], self.batch.line_ends_K[is_last_K])

    def _spans(self, starts: Int64s, ends: Int64s) -> Spans:
        borders_D1 = self.borders(starts)
        repeats = find_repeats(self.batch.hash_of_spans(starts, ends), borders_D1)
        return Spans(starts, ends, borders_D1, repeats)

    def duplicate_spans(self, spans: Spans) -> Floats:
        return self.share(self.count(spans.starts[spans.repeats]), np.diff(spans.borders_D1))

    def duplicate_span_chars(self, spans: Spans) -> Floats:
        starts, ends = spans.starts[spans.repeats], spans.ends[spans.repeats]
        return self.share_of_chars(self.batch.count_characters(starts, ends), starts)

    def share_of_lines(self, is_counted_L: Bools) -> Floats:
        return self.share(self.sum_of_lines(is_counted_L), np.diff(self.lines.borders_D1))

    def sum_of_lines(self, values_L: Int64s | Bools) -> Int64s:
        return _sums(values_L, self.lines.borders_D1)

    @cached_property
    def line_text(self) -> tuple[Int64s, Int64s]:
        """The start and end of each line without the white space around it."""
        starts_T, ends_T = self.batch.tokens_T
        first = np.searchsorted(starts_T, self.lines.starts)
        last = np.searchsorted(starts_T, self.lines.ends) - 1
        return starts_T[first], ends_T[last]

    def lines_begin_with(self, needles: Iterable[str]) -> Bools:
        begin_L: Bools = np.logical_or.reduce([self._begin_with(self.line_text[0], needle) for needle in needles])
        return begin_L

    def lines_end_with(self, needles: Iterable[str]) -> Bools:
        ends = self.line_text[1]
        found = [self._begin_with(np.maximum(ends - len(needle.encode()), 0), needle) for needle in needles]
        end_L: Bools = np.logical_or.reduce(found)
        return end_L

    def lines_at(self, places: Int64s) -> Int64s:
        """Return the line of each of these bytes. Bytes outside of lines with words are left out."""
        lines = np.searchsorted(self.lines.starts, places, side="right") - 1
        lines, places = lines[lines >= 0], places[lines >= 0]
        return lines[places < self.lines.ends[lines]]

    def count_by_line(self, places: Int64s) -> Int64s:
        return np.bincount(self.lines_at(places), minlength=len(self.lines.starts))

    @cached_property
    def num_lines_D(self) -> Int64s:
        return np.diff(self.batch.lines_D1)

    @cached_property
    def _chars_K(self) -> Int64s:
        return self.batch.count_characters(self.batch.line_starts_K, self.batch.line_ends_K)

    @property
    def longest_line_D(self) -> Int64s:
        longest_D: Int64s = np.maximum.reduceat(self._chars_K, self.batch.lines_D1[:-1])
        return longest_D

    @property
    def mean_line_D(self) -> Floats:
        return self.share(_sums(self._chars_K, self.batch.lines_D1), self.num_lines_D)


def _sums(values_I: Int64s | Bools, borders_D1: Int64s) -> Int64s:
    sums_I1 = np.zeros(len(values_I) + 1, np.int64)
    np.cumsum(values_I, out=sums_I1[1:])
    return np.diff(sums_I1[borders_D1])


def _find_all(text: bytes, needle: bytes) -> Iterator[int]:
    place = text.find(needle)
    while place >= 0:
        yield place
        place = text.find(needle, place + len(needle))
