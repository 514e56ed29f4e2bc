"""Settings that decide which documents are kept: form, language, quality."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from common.settings.conditions import OnlyIf
from common.settings.markers import SHARED_BY_SOURCES, ShapesData, ShapesDataByContent
from common.settings.model import Section
from data_pipeline.config.text import Share

__all__ = ["Bound", "HeuristicConfig", "LanguageConfig", "QualityConfig"]

Preset = Literal["gopher-quality", "gopher-repetition", "c4", "fineweb", "spam", "code"]


class Bound(Enum):
    """Whether a setting is the lowest or the highest allowed value of a measure. The type of the setting states it."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


ValueT = TypeVar("ValueT")
AtLeast = Annotated[ValueT, Bound.AT_LEAST]
AtMost = Annotated[ValueT, Bound.AT_MOST]
_QUALITY, _REPETITION, _C4, _FINEWEB, _SPAM, _CODE = (
    OnlyIf(f"heuristics.presets has {preset}")
    for preset in ("gopher-quality", "gopher-repetition", "c4", "fineweb", "spam", "code")
)
_PERPLEXITY = OnlyIf("quality.trusted or quality.reference")


class HeuristicConfig(Section):
    """Rules about the form of a text. Only the presets that are set apply. The default thresholds are those of the papers."""

    presets: ShapesData[tuple[Preset, ...]] = Field(
        (),
        description="Sets of rules that apply. Prose and web text: gopher-quality, gopher-repetition (Rae 2021), c4 (Raffel "
        "2020), fineweb (Penedo 2024), spam. Code: code (Li 2023).",
    )
    gopher_min_words: Annotated[ShapesData[AtLeast[int]], _QUALITY] = Field(50, ge=0, description="Words: at least this many.")
    gopher_max_words: Annotated[ShapesData[AtMost[int]], _QUALITY] = Field(100_000, ge=1, description="Words: at most this many.")
    gopher_min_word_length: Annotated[ShapesData[AtLeast[float]], _QUALITY] = Field(
        3, ge=0, description="Mean length of words: at least this many characters."
    )
    gopher_max_word_length: Annotated[ShapesData[AtMost[float]], _QUALITY] = Field(
        10, ge=0, description="Mean length of words: at most this many characters."
    )
    gopher_max_symbols: Annotated[ShapesData[AtMost[float]], _QUALITY] = Field(
        0.1, ge=0, description="Hash signs or ellipses, whichever are more: at most this many for each word."
    )
    gopher_max_bullet_lines: Annotated[ShapesData[AtMost[Share]], _QUALITY] = Field(
        0.9, description="Lines that begin with a bullet: at most this share of lines."
    )
    gopher_max_ellipsis_lines: Annotated[ShapesData[AtMost[Share]], _QUALITY] = Field(
        0.3, description="Lines that end with an ellipsis: at most this share of lines."
    )
    gopher_min_alphabetic: Annotated[ShapesData[AtLeast[Share]], _QUALITY] = Field(
        0.8, description="Words with a letter: at least this share of words."
    )
    gopher_min_stop_words: Annotated[ShapesData[AtLeast[int]], _QUALITY] = Field(
        2, ge=0, le=8, description="Different words of the, be, to, of, and, that, have, with: at least this many. English only."
    )
    gopher_max_duplicate_lines: Annotated[ShapesData[AtMost[Share]], _REPETITION] = Field(
        0.3, description="Lines that repeat an earlier line: at most this share of lines."
    )
    gopher_max_duplicate_paragraphs: Annotated[ShapesData[AtMost[Share]], _REPETITION] = Field(
        0.3, description="Paragraphs that repeat an earlier paragraph: at most this share of paragraphs."
    )
    gopher_max_duplicate_line_chars: Annotated[ShapesData[AtMost[Share]], _REPETITION] = Field(
        0.2, description="Characters in lines that repeat an earlier line: at most this share of characters."
    )
    gopher_max_duplicate_paragraph_chars: Annotated[ShapesData[AtMost[Share]], _REPETITION] = Field(
        0.2, description="Characters in paragraphs that repeat an earlier paragraph: at most this share of characters."
    )
    gopher_max_top_ngrams: Annotated[ShapesData[AtMost[tuple[Share, Share, Share]]], _REPETITION] = Field(
        (0.2, 0.18, 0.16), description="Characters in the most common run of 2, 3 and 4 words: at most this share of characters."
    )
    gopher_max_duplicate_ngrams: Annotated[ShapesData[AtMost[tuple[Share, Share, Share, Share, Share, Share]]], _REPETITION] = (
        Field(
            (0.15, 0.14, 0.13, 0.12, 0.11, 0.1),
            description="Characters in repeated runs of 5, 6, 7, 8, 9 and 10 words: at most this share of characters.",
        )
    )
    c4_max_curly_brackets: Annotated[ShapesData[AtMost[int]], _C4] = Field(
        0, ge=0, description="Opening curly brackets: at most this many."
    )
    c4_max_lorem_ipsum: Annotated[ShapesData[AtMost[int]], _C4] = Field(
        0, ge=0, description="Occurrences of lorem ipsum: at most this many."
    )
    c4_min_sentences: Annotated[ShapesData[AtLeast[int]], _C4] = Field(
        3, ge=0, description="Sentences in the lines that C4 keeps: at least this many."
    )
    c4_min_line_words: Annotated[ShapesData[int], _C4] = Field(
        5, ge=0, description="Lowest number of words in a line whose sentences c4_min_sentences counts."
    )
    fineweb_min_punctuated_lines: Annotated[ShapesData[AtLeast[Share]], _FINEWEB] = Field(
        0.12, description="Lines that end with terminal punctuation: at least this share of lines."
    )
    fineweb_max_short_lines: Annotated[ShapesData[AtMost[Share]], _FINEWEB] = Field(
        0.67, description="Lines of up to fineweb_short_line_chars characters: at most this share of lines."
    )
    fineweb_short_line_chars: Annotated[ShapesData[int], _FINEWEB] = Field(
        30, ge=1, description="Longest line that counts as short, in characters."
    )
    fineweb_max_duplicate_line_chars: Annotated[ShapesData[AtMost[Share]], _FINEWEB] = Field(
        0.1, description="Characters in lines that repeat an earlier line: at most this share of characters."
    )
    fineweb_max_newlines: Annotated[ShapesData[AtMost[float]], _FINEWEB] = Field(
        0.3, ge=0, description="Line ends: at most this many for each word."
    )
    spam_max_repeated: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.2, description="Characters in runs of ten or more equal visible characters: at most this share of characters."
    )
    spam_max_urls: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.3, description="Characters in web addresses: at most this share of characters."
    )
    spam_max_digits: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.3, description="Digits: at most this share of characters other than white space."
    )
    spam_max_symbols: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.3, description="ASCII punctuation: at most this share of characters other than white space."
    )
    spam_max_upper_case: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.5, description="Capitals: at most this share of ASCII letters."
    )
    spam_max_keyword: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.15,
        description="Occurrences of the most common word of four or more characters: at most this share of words. "
        "Only texts of 50 words and more are checked.",
    )
    spam_max_blobs: Annotated[ShapesData[AtMost[Share]], _SPAM] = Field(
        0.1, description="Characters in words of over 40 characters, such as base64: at most this share of characters."
    )
    code_max_line_chars: Annotated[ShapesData[AtMost[int]], _CODE] = Field(
        1000, ge=1, description="Length of the longest line: at most this many characters."
    )
    code_max_mean_line_chars: Annotated[ShapesData[AtMost[float]], _CODE] = Field(
        100, ge=1, description="Mean length of lines: at most this many characters."
    )
    code_min_alphanumeric: Annotated[ShapesData[AtLeast[Share]], _CODE] = Field(
        0.25, description="Letters and digits: at least this share of characters."
    )
    code_max_generated: Annotated[ShapesData[AtMost[int]], _CODE] = Field(
        0, ge=0, description="Comments in the first five lines that say that the code is generated: at most this many."
    )

    @classmethod
    def bound(cls, setting: str) -> Bound:
        return next(item for item in cls.model_fields[setting].metadata if isinstance(item, Bound))


class LanguageConfig(Section):
    """Identification of languages, and the languages that are kept."""

    identify: ShapesData[bool] = Field(
        True, description="Whether languages are identified, for the report and the rules that need them. Code has none."
    )
    keep: ShapesData[tuple[str, ...]] = Field(
        (), description="ISO 639-1 codes of the languages that are kept; empty: all languages."
    )
    min_confidence: Annotated[ShapesData[float], OnlyIf("language.keep")] = Field(
        0.4,
        ge=0,
        le=1,
        description="Confidence below which a document is rejected, if `keep` is set. The report shows what each value keeps. "
        "The default was measured on technical text in 26 languages (docs/data.md).",
    )
    sample_bytes: Annotated[ShapesData[int], OnlyIf("language.identify")] = Field(
        2048,
        ge=256,
        le=1 << 20,
        description="Number of bytes of a longer document that are examined: from its start, middle and end.",
    )
    fasttext_model: Annotated[ShapesDataByContent[Path | None], OnlyIf("language.identify"), SHARED_BY_SOURCES] = Field(
        None, description="fastText model file that replaces the built-in models; its labels are language codes."
    )

    @model_validator(mode="after")
    def _what_is_kept_is_identified(self) -> Self:
        if self.keep and not self.identify:
            raise ValueError("keep names languages, but identify = false; set identify to true, or remove keep")
        return self


class QualityConfig(Section):
    """Bounds on the content of documents, measured by models that the pipeline trains. A source may have other thresholds."""

    trusted: Annotated[ShapesData[str | None], SHARED_BY_SOURCES] = Field(
        None,
        description="Source that the reference model is trained on. Its documents are not judged. none: perplexity is measured "
        "only if `reference` is set.",
    )
    reference: Annotated[ShapesDataByContent[Path | None], SHARED_BY_SOURCES] = Field(
        None,
        description="Reference of the perplexity, which judges the documents of all sources: a file or folder of good text, an "
        "n-gram model in the ARPA format, or prepared data with a reference model. none: `trusted`.",
    )
    reference_tokens: Annotated[ShapesData[int], _PERPLEXITY, SHARED_BY_SOURCES] = Field(
        64 << 20,
        ge=1024,
        description="Number of tokens that train the reference model, from the start of the trusted source or reference text.",
    )
    reference_bits: Annotated[ShapesData[int], _PERPLEXITY, SHARED_BY_SOURCES] = Field(
        22,
        ge=12,
        le=28,
        description="Number of counters of the reference model for pairs of tokens, and for triples, as a power of two.",
    )
    max_perplexity: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        1000.0, ge=1, description="Perplexity per token above which a document is rejected; none: no upper bound."
    )
    min_perplexity: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        None,
        ge=1,
        description="Perplexity per token below which a document is rejected, such as repeated text; none: no lower bound.",
    )
    max_perplexity_percentile: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        None, ge=0, le=100, description="Percentage of each source's documents that is kept, those of lowest perplexity; none: 100."
    )
    min_perplexity_percentile: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        None,
        ge=0,
        le=100,
        description="Percentage of each source's documents that is rejected, those of lowest perplexity; none: 0.",
    )
    good: Annotated[ShapesDataByContent[tuple[Path, ...]], SHARED_BY_SOURCES] = Field(
        (), description="Files or folders with examples of wanted text, which train the classifier together with `bad`."
    )
    bad: Annotated[ShapesDataByContent[tuple[Path, ...]], SHARED_BY_SOURCES] = Field(
        (), description="Files or folders with examples of unwanted text, which train the classifier together with `good`."
    )
    classifier_bits: Annotated[ShapesData[int], OnlyIf("quality.good"), SHARED_BY_SOURCES] = Field(
        18, ge=10, le=24, description="Number of weights of the classifier, as a power of two."
    )
    min_good_probability: Annotated[ShapesData[float], OnlyIf("quality.good")] = Field(
        0.5,
        ge=0,
        le=1,
        description="Lowest probability of being good at which a document is kept. Good and bad examples have equal weight.",
    )

    @property
    def measures_perplexity(self) -> bool:
        return self.trusted is not None or self.reference is not None

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.trusted is not None and self.reference is not None:
            raise ValueError("quality.trusted and quality.reference are both set; keep one of them, because there is one reference")
        if bool(self.good) != bool(self.bad):
            given, missing = ("good", "bad") if self.good else ("bad", "good")
            raise ValueError(
                f"quality.{given} is set, but quality.{missing} is not; the classifier needs examples of both, so set both"
            )
        for unit, low, high in (
            ("perplexity", self.min_perplexity, self.max_perplexity),
            ("perplexity_percentile", self.min_perplexity_percentile, self.max_perplexity_percentile),
        ):
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{unit} = {low} is above max_{unit} = {high}; nothing would be kept")
        return self
