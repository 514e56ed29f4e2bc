"""The presets `gopher-quality` and `gopher-repetition`: Rae et al. 2021, Scaling Language Models, appendix A1.1 and table A1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_pipeline.heuristics.rule import Preset, Share

if TYPE_CHECKING:
    from data_pipeline.heuristics.statistics import Bools, Floats, Int64s, TextStatistics

QUALITY = Preset("gopher-quality", "Rae 2021")
REPETITION = Preset("gopher-repetition", "Rae 2021")

_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


def is_spaced(texts: TextStatistics) -> Bools:
    return texts.is_spaced_D


@QUALITY.at_least("gopher-word-count", "words", "gopher_min_words", int, 50, ge=0)
def fewest_words(texts: TextStatistics) -> Int64s:
    """Words: at least this many."""
    return texts.words_D


@QUALITY.at_most("gopher-word-count", "words", "gopher_max_words", int, 100_000, ge=1)
def most_words(texts: TextStatistics) -> Int64s:
    """Words: at most this many."""
    return texts.words_D


@QUALITY.at_least("gopher-word-length", "mean length of words", "gopher_min_word_length", float, 3, ge=0, applies=is_spaced)
def shortest_mean_word(texts: TextStatistics) -> Floats:
    """Mean length of words: at least this many characters."""
    return texts.mean_word_length_D


@QUALITY.at_most("gopher-word-length", "mean length of words", "gopher_max_word_length", float, 10, ge=0, applies=is_spaced)
def longest_mean_word(texts: TextStatistics) -> Floats:
    """Mean length of words: at most this many characters."""
    return texts.mean_word_length_D


@QUALITY.at_most("gopher-symbols", "# or ellipses for each word", "gopher_max_symbols", float, 0.1, ge=0)
def symbols_per_word(texts: TextStatistics) -> Floats:
    """Hash signs or ellipses, whichever are more: at most this many for each word."""
    hashes_D = texts.count_bytes(texts.batch.bytes_N == ord("#"))
    return texts.share(hashes_D.clip(min=texts.occurrences("...", "…")), texts.words_D)


@QUALITY.at_most("gopher-bullet-lines", "lines with bullets", "gopher_max_bullet_lines", Share, 0.9)
def bullet_lines(texts: TextStatistics) -> Floats:
    """Lines that begin with a bullet: at most this share of lines."""
    return texts.share_of_lines(texts.lines_begin_with("-*•"))


@QUALITY.at_most("gopher-ellipsis-lines", "lines with ellipses", "gopher_max_ellipsis_lines", Share, 0.3)
def ellipsis_lines(texts: TextStatistics) -> Floats:
    """Lines that end with an ellipsis: at most this share of lines."""
    return texts.share_of_lines(texts.lines_end_with(("...", "…")))


# A word is a run between white space here, so a lone symbol counts as a word without a letter.
@QUALITY.at_least("gopher-alphabetic", "words with a letter", "gopher_min_alphabetic", Share, 0.8)
def alphabetic_words(texts: TextStatistics) -> Floats:
    """Words with a letter: at least this share of words."""
    is_letter_N = texts.are_letters_N
    if not texts.batch.is_ascii:
        is_letter_N = is_letter_N | texts.batch.is_word_N & (texts.batch.bytes_N >= 0x80)
    return texts.share_of_tokens(is_letter_N)


@QUALITY.at_least(
    "gopher-stop-words", "stop words", "gopher_min_stop_words", int, 2, ge=0, le=8, applies=lambda texts: texts.is_english_D
)
def stop_words(texts: TextStatistics) -> Int64s:
    """Different words of the, be, to, of, and, that, have, with: at least this many. English only."""
    return sum((texts.count_word(word).clip(max=1) for word in _STOP_WORDS), start=0 * texts.words_D)


@REPETITION.at_most("gopher-duplicate-paragraphs", "duplicate paragraphs", "gopher_max_duplicate_paragraphs", Share, 0.3)
def duplicate_paragraphs(texts: TextStatistics) -> Floats:
    """Paragraphs that repeat an earlier paragraph: at most this share of paragraphs."""
    return texts.duplicate_spans(texts.paragraphs)


@REPETITION.at_most(
    "gopher-duplicate-paragraph-chars", "characters in duplicate paragraphs", "gopher_max_duplicate_paragraph_chars", Share, 0.2
)
def duplicate_paragraph_chars(texts: TextStatistics) -> Floats:
    """Characters in paragraphs that repeat an earlier paragraph: at most this share of characters."""
    return texts.duplicate_span_chars(texts.paragraphs)


@REPETITION.at_most("gopher-duplicate-lines", "duplicate lines", "gopher_max_duplicate_lines", Share, 0.3)
def duplicate_lines(texts: TextStatistics) -> Floats:
    """Lines that repeat an earlier line: at most this share of lines."""
    return texts.duplicate_spans(texts.lines)


@REPETITION.at_most("gopher-duplicate-line-chars", "characters in duplicate lines", "gopher_max_duplicate_line_chars", Share, 0.2)
def duplicate_line_chars(texts: TextStatistics) -> Floats:
    """Characters in lines that repeat an earlier line: at most this share of characters."""
    return texts.duplicate_span_chars(texts.lines)


@REPETITION.at_most(
    "gopher-top-ngrams",
    "characters in the commonest run of {} words",
    "gopher_max_top_ngrams",
    tuple[Share, Share, Share],
    (0.2, 0.18, 0.16),
    sizes=(2, 3, 4),
)
def top_ngrams(texts: TextStatistics, size: int) -> Floats:
    """Characters in the most common run of 2, 3 and 4 words: at most this share of characters."""
    return texts.commonest_run_chars(size)


@REPETITION.at_most(
    "gopher-duplicate-ngrams",
    "characters in duplicate runs of {} words",
    "gopher_max_duplicate_ngrams",
    tuple[Share, Share, Share, Share, Share, Share],
    (0.15, 0.14, 0.13, 0.12, 0.11, 0.1),
    sizes=(5, 6, 7, 8, 9, 10),
)
def duplicate_ngrams(texts: TextStatistics, size: int) -> Floats:
    """Characters in repeated runs of 5, 6, 7, 8, 9 and 10 words: at most this share of characters."""
    # If a run of words is repeated, so are the shorter runs in it. So the share is largest for the shortest runs, and the others
    # are only computed for texts in which this share exceeds the lowest threshold.
    of_shortest_D = texts.duplicate_runs_of_5
    if size == 5:
        return of_shortest_D
    return texts.duplicate_run_chars(size, of_shortest_D > min(texts.settings.gopher_max_duplicate_ngrams))
