"""The presets `gopher-quality` and `gopher-repetition`: Rae et al. 2021, Scaling Language Models, appendix A1.1 and table A1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_pipeline.heuristics.rule import Preset, Setting, Share

if TYPE_CHECKING:
    from data_pipeline.heuristics.statistics import Floats, Int64s, TextStatistics

__all__ = ["QUALITY", "REPETITION"]

QUALITY = Preset("gopher-quality", "Rae 2021")
REPETITION = Preset("gopher-repetition", "Rae 2021")

_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_BULLETS = ("-", "*", "•")


@QUALITY.rule(
    "gopher-word-count",
    "words",
    at_least=Setting("gopher_min_words", int, 50, "Words: at least this many.", ge=0),
    at_most=Setting("gopher_max_words", int, 100_000, "Words: at most this many.", ge=1),
)
def words(texts: TextStatistics) -> Int64s:
    return texts.words_D


# In scripts without spaces most words are single characters.
@QUALITY.rule(
    "gopher-word-length",
    "mean length of words",
    at_least=Setting("gopher_min_word_length", float, 3, "Mean length of words: at least this many characters.", ge=0),
    at_most=Setting("gopher_max_word_length", float, 10, "Mean length of words: at most this many characters.", ge=0),
    applies=lambda texts: texts.is_spaced_D,
)
def mean_word_length(texts: TextStatistics) -> Floats:
    return texts.share(texts.sum_of_words(texts.word_chars_W), texts.words_D)


@QUALITY.rule(
    "gopher-symbols",
    "# or ellipses for each word",
    at_most=Setting(
        "gopher_max_symbols", float, 0.1, "Hash signs or ellipses, whichever are more: at most this many for each word.", ge=0
    ),
)
def symbols_per_word(texts: TextStatistics) -> Floats:
    hashes_D = texts.count_bytes(texts.batch.bytes_N == ord("#"))
    return texts.share(hashes_D.clip(min=texts.occurrences("...", "…")), texts.words_D)


@QUALITY.rule(
    "gopher-bullet-lines",
    "lines with bullets",
    at_most=Setting("gopher_max_bullet_lines", Share, 0.9, "Lines that begin with a bullet: at most this share of lines."),
)
def bullet_lines(texts: TextStatistics) -> Floats:
    return texts.share_of_lines(texts.lines_begin_with(_BULLETS))


@QUALITY.rule(
    "gopher-ellipsis-lines",
    "lines with ellipses",
    at_most=Setting("gopher_max_ellipsis_lines", Share, 0.3, "Lines that end with an ellipsis: at most this share of lines."),
)
def ellipsis_lines(texts: TextStatistics) -> Floats:
    return texts.share_of_lines(texts.lines_end_with(("...", "…")))


# The share is taken of the runs between white space, so a lone symbol counts as a word without a letter.
@QUALITY.rule(
    "gopher-alphabetic",
    "words with a letter",
    at_least=Setting("gopher_min_alphabetic", Share, 0.8, "Words with a letter: at least this share of words."),
)
def alphabetic_words(texts: TextStatistics) -> Floats:
    is_letter_N = texts.are_letters_N
    if not texts.batch.is_ascii:
        is_letter_N = is_letter_N | texts.batch.is_word_N & (texts.batch.bytes_N >= 0x80)
    return texts.share_of_tokens(is_letter_N)


@QUALITY.rule(
    "gopher-stop-words",
    "stop words",
    at_least=Setting(
        "gopher_min_stop_words",
        int,
        2,
        f"Different words of {', '.join(_STOP_WORDS)}: at least this many. English only.",
        ge=0,
        le=len(_STOP_WORDS),
    ),
    applies=lambda texts: texts.is_english_D,
)
def stop_words(texts: TextStatistics) -> Int64s:
    return sum((texts.count_word(word).clip(max=1) for word in _STOP_WORDS), start=0 * texts.words_D)


@REPETITION.rule(
    "gopher-duplicate-paragraphs",
    "duplicate paragraphs",
    at_most=Setting(
        "gopher_max_duplicate_paragraphs",
        Share,
        0.3,
        "Paragraphs that repeat an earlier paragraph: at most this share of paragraphs.",
    ),
)
def duplicate_paragraphs(texts: TextStatistics) -> Floats:
    return texts.duplicate_spans(texts.paragraphs)


@REPETITION.rule(
    "gopher-duplicate-paragraph-chars",
    "characters in duplicate paragraphs",
    at_most=Setting(
        "gopher_max_duplicate_paragraph_chars",
        Share,
        0.2,
        "Characters in paragraphs that repeat an earlier paragraph: at most this share of characters.",
    ),
)
def duplicate_paragraph_chars(texts: TextStatistics) -> Floats:
    return texts.duplicate_span_chars(texts.paragraphs)


@REPETITION.rule(
    "gopher-duplicate-lines",
    "duplicate lines",
    at_most=Setting("gopher_max_duplicate_lines", Share, 0.3, "Lines that repeat an earlier line: at most this share of lines."),
)
def duplicate_lines(texts: TextStatistics) -> Floats:
    return texts.duplicate_spans(texts.lines)


@REPETITION.rule(
    "gopher-duplicate-line-chars",
    "characters in duplicate lines",
    at_most=Setting(
        "gopher_max_duplicate_line_chars",
        Share,
        0.2,
        "Characters in lines that repeat an earlier line: at most this share of characters.",
    ),
)
def duplicate_line_chars(texts: TextStatistics) -> Floats:
    return texts.duplicate_span_chars(texts.lines)


@REPETITION.rule(
    "gopher-top-ngrams",
    "characters in the commonest run of {} words",
    at_most=Setting(
        "gopher_max_top_ngrams",
        tuple[Share, Share, Share],
        (0.2, 0.18, 0.16),
        "Characters in the most common run of 2, 3 and 4 words: at most this share of characters.",
    ),
    sizes=(2, 3, 4),
)
def top_ngrams(texts: TextStatistics, size: int) -> Floats:
    return texts.commonest_run_chars(size)


# If a run of words is repeated, so are the shorter runs in it. So the share is largest for the shortest runs, and the others are
# only computed for texts in which this share exceeds the lowest threshold.
@REPETITION.rule(
    "gopher-duplicate-ngrams",
    "characters in duplicate runs of {} words",
    at_most=Setting(
        "gopher_max_duplicate_ngrams",
        tuple[Share, Share, Share, Share, Share, Share],
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.1),
        "Characters in repeated runs of 5, 6, 7, 8, 9 and 10 words: at most this share of characters.",
    ),
    sizes=(5, 6, 7, 8, 9, 10),
)
def duplicate_ngrams(texts: TextStatistics, size: int) -> Floats:
    of_shortest_D = texts.duplicate_runs_of_5
    if size == 5:
        return of_shortest_D
    return texts.duplicate_run_chars(size, of_shortest_D > min(texts.settings.gopher_max_duplicate_ngrams))
