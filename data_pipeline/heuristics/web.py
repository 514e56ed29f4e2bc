"""The presets `c4` (Raffel et al. 2020, Exploring the Limits of Transfer Learning, section 2.2) and `fineweb` (Penedo et al. 2024,
The FineWeb Datasets, section 3.6).

C4 removes lines and then counts sentences. Here `c4` counts the sentences of the lines that C4 would keep, and does not change the
text; `clean.drop_lines` removes the lines. A sentence ends with `.`, `?` or `!` before white space or a closing quote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_pipeline.heuristics.rule import Preset, Share

if TYPE_CHECKING:
    from data_pipeline.heuristics.statistics import Floats, Int64s, TextStatistics

C4 = Preset("c4", "Raffel 2020")
FINEWEB = Preset("fineweb", "Penedo 2024")

NOTICES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
"""C4 removes a line with one of these."""
LINE_ENDS = (".", "?", "!", '"', "'", "”", "’", "。", "？", "！")  # noqa: RUF001
"""C4 keeps a line that ends with one of these, but not with three dots."""
MAX_WORD_CHARS = 1000  # c4 removes a line with a longer word
_SENTENCE_ENDS = ".?!…。？！．؟۔।"  # noqa: RUF001


@C4.at_most("c4-curly-bracket", "opening curly brackets", "c4_max_curly_brackets", int, 0, ge=0)
def curly_brackets(texts: TextStatistics) -> Int64s:
    """Opening curly brackets: at most this many."""
    return texts.occurrences("{")


@C4.at_most("c4-lorem-ipsum", "lorem ipsum", "c4_max_lorem_ipsum", int, 0, ge=0)
def lorem_ipsum(texts: TextStatistics) -> Int64s:
    """Occurrences of lorem ipsum: at most this many."""
    return texts.occurrences("lorem ipsum")


C4.setting("c4_min_line_words", int, 5, "Lowest number of words in a line whose sentences c4_min_sentences counts.", ge=0)


@C4.at_least("c4-sentences", "sentences in proper lines", "c4_min_sentences", int, 3, ge=0)
def sentences(texts: TextStatistics) -> Int64s:
    """Sentences in the lines that C4 keeps: at least this many."""
    is_kept_L = texts.lines_end_with(LINE_ENDS) & ~texts.lines_end_with(["..."])
    is_kept_L &= texts.words_in_lines_L >= texts.settings.c4_min_line_words
    is_kept_L[texts.lines_at(texts.places_of("javascript", *NOTICES))] = False
    is_kept_L[texts.lines_at(texts.long_tokens(MAX_WORD_CHARS))] = False
    sentences_L = texts.count_by_line(texts.sentence_ends(_SENTENCE_ENDS)).clip(min=1)  # each kept line has at least one
    return texts.sum_of_lines(sentences_L * is_kept_L)


@FINEWEB.at_least("fineweb-punctuated-lines", "lines with terminal punctuation", "fineweb_min_punctuated_lines", Share, 0.12)
def punctuated_lines(texts: TextStatistics) -> Floats:
    """Lines that end with terminal punctuation: at least this share of lines."""
    return texts.share_of_lines(texts.lines_end_with(_SENTENCE_ENDS))


FINEWEB.setting("fineweb_short_line_chars", int, 30, "Longest line that counts as short, in characters.", ge=1)


@FINEWEB.at_most("fineweb-short-lines", "short lines", "fineweb_max_short_lines", Share, 0.67)
def short_lines(texts: TextStatistics) -> Floats:
    """Lines of up to fineweb_short_line_chars characters: at most this share of lines."""
    return texts.share_of_lines(texts.line_chars_L <= texts.settings.fineweb_short_line_chars)


@FINEWEB.at_most("fineweb-duplicate-line-chars", "characters in duplicate lines", "fineweb_max_duplicate_line_chars", Share, 0.1)
def duplicate_line_chars(texts: TextStatistics) -> Floats:
    """Characters in lines that repeat an earlier line: at most this share of characters."""
    return texts.duplicate_span_chars(texts.lines)


@FINEWEB.at_most("fineweb-newlines", "line ends for each word", "fineweb_max_newlines", float, 0.3, ge=0)
def newlines_per_word(texts: TextStatistics) -> Floats:
    """Line ends: at most this many for each word."""
    return texts.share(texts.num_lines_D - 1, texts.words_D)
