"""The preset `spam` of this project: text that programs write for search engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_pipeline.heuristics.rule import Preset, Share

if TYPE_CHECKING:
    from data_pipeline.heuristics.statistics import Floats, TextStatistics

SPAM = Preset("spam")

_REPEATED_CHARS = 10
_KEYWORD_CHARS = 4
_KEYWORD_MIN_WORDS = 50
_BLOB_CHARS = 40


# The characters are those of ASCII and those of three bytes.
@SPAM.at_most("spam-repeated", "characters in runs of one", "spam_max_repeated", Share, 0.2)
def repeated_chars(texts: TextStatistics) -> Floats:
    """Characters in runs of ten or more equal visible characters: at most this share of characters."""
    bytes_N = texts.batch.bytes_N
    repeated_D = texts.bytes_in_runs((bytes_N[1:] == bytes_N[:-1]) & texts.are_between("!", "~")[1:], _REPEATED_CHARS - 1)
    if not texts.batch.is_ascii:
        is_same = (bytes_N[3:] == bytes_N[:-3]) & (bytes_N[3:] >= 0x80)
        repeated_D += texts.bytes_in_runs(is_same, 3 * (_REPEATED_CHARS - 1)) // 3
    return texts.share(repeated_D, texts.chars_D)


@SPAM.at_most("spam-urls", "characters in web addresses", "spam_max_urls", Share, 0.3)
def urls(texts: TextStatistics) -> Floats:
    """Characters in web addresses: at most this share of characters."""
    return texts.share_in_tokens_at(texts.places_of("://", "www."))


@SPAM.at_most("spam-digits", "digits", "spam_max_digits", Share, 0.3)
def digits(texts: TextStatistics) -> Floats:
    """Digits: at most this share of characters other than white space."""
    return texts.share(texts.digits_D, texts.visible_D + texts.beyond_ascii_D)


@SPAM.at_most("spam-symbols", "punctuation", "spam_max_symbols", Share, 0.3)
def symbols(texts: TextStatistics) -> Floats:
    """ASCII punctuation: at most this share of characters other than white space."""
    return texts.share(texts.visible_D - texts.letters_D - texts.digits_D, texts.visible_D + texts.beyond_ascii_D)


@SPAM.at_most("spam-upper-case", "capitals among letters", "spam_max_upper_case", Share, 0.5)
def upper_case(texts: TextStatistics) -> Floats:
    """Capitals: at most this share of ASCII letters."""
    return texts.share(texts.count_bytes(texts.are_between("A", "Z")), texts.letters_D)


@SPAM.at_most("spam-keyword", "the commonest word", "spam_max_keyword", Share, 0.15)
def commonest_keyword(texts: TextStatistics) -> Floats:
    """Occurrences of the most common word of four or more characters: at most this share of words. Only texts of 50
    words and more are checked.
    """
    commonest_D = texts.count_commonest_word(texts.word_chars_W >= _KEYWORD_CHARS)
    return texts.share(commonest_D * (texts.words_D >= _KEYWORD_MIN_WORDS), texts.words_D)


@SPAM.at_most("spam-blobs", "characters in very long words", "spam_max_blobs", Share, 0.1)
def blobs(texts: TextStatistics) -> Floats:
    """Characters in words of over 40 characters, such as base64: at most this share of characters."""
    is_blob_W = (texts.word_chars_W > _BLOB_CHARS) & (texts.batch.bytes_N[texts.batch.word_starts_W] < 0x80)
    return texts.share_of_chars(texts.word_chars_W[is_blob_W], texts.batch.word_starts_W[is_blob_W])
