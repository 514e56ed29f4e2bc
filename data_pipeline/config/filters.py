"""Settings of which documents are kept: form, language, quality."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Section
from data_pipeline.config.text import Share

__all__ = ["HeuristicSettings", "LanguageSettings", "QualitySettings"]

Preset = Literal["gopher-quality", "gopher-repetition", "c4", "fineweb", "spam", "code"]


class HeuristicSettings(Section):
    """Rules of thumb about the form of a text. Which presets apply is a setting; their thresholds are those of the papers."""

    presets: tuple[Preset, ...] = Field(
        (),
        description="sets of rules: gopher-quality, gopher-repetition (Rae 2021), c4 (Raffel 2020), fineweb (Penedo 2024), spam; "
        "code (Li 2023), the only one that applies to code, and only to code",
    )
    gopher_min_words: int = Field(50, ge=0, description="fewest words")
    gopher_max_words: int = Field(100_000, ge=1, description="most words")
    gopher_min_word_length: float = Field(3, ge=0, description="least mean length of words, in characters")
    gopher_max_word_length: float = Field(10, ge=0, description="greatest mean length of words, in characters")
    gopher_max_symbols: float = Field(0.1, ge=0, description="most hash signs, or ellipses, for each word")
    gopher_max_bullet_lines: Share = Field(0.9, description="greatest share of lines that begin with a bullet")
    gopher_max_ellipsis_lines: Share = Field(0.3, description="greatest share of lines that end with an ellipsis")
    gopher_min_alphabetic: Share = Field(0.8, description="least share of words with a letter")
    gopher_min_stop_words: int = Field(2, ge=0, le=8, description="fewest of: the, be, to, of, and, that, have, with; English only")
    gopher_max_duplicate_lines: Share = Field(0.3, description="greatest share of lines that repeat an earlier one")
    gopher_max_duplicate_paragraphs: Share = Field(0.3, description="greatest share of paragraphs that repeat an earlier one")
    gopher_max_duplicate_line_chars: Share = Field(0.2, description="greatest share of characters in such lines")
    gopher_max_duplicate_paragraph_chars: Share = Field(0.2, description="greatest share of characters in such paragraphs")
    gopher_max_top_ngrams: tuple[Share, Share, Share] = Field(
        (0.2, 0.18, 0.16), description="greatest share of characters in the commonest run of 2, 3 and 4 words"
    )
    gopher_max_duplicate_ngrams: tuple[Share, Share, Share, Share, Share, Share] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.1), description="greatest share of characters in repeated runs of 5, 6, … 10 words"
    )
    c4_max_curly_brackets: int = Field(0, ge=0, description="most opening curly brackets")
    c4_max_lorem_ipsum: int = Field(0, ge=0, description="most occurrences of lorem ipsum")
    c4_min_sentences: int = Field(3, ge=0, description="fewest sentences, in lines that C4 keeps")
    c4_min_line_words: int = Field(5, ge=0, description="fewest words in a line that C4 keeps")
    fineweb_min_punctuated_lines: Share = Field(0.12, description="least share of lines that end with terminal punctuation")
    fineweb_max_short_lines: Share = Field(0.67, description="greatest share of lines of up to fineweb_short_line_chars")
    fineweb_short_line_chars: int = Field(30, ge=1, description="longest line that counts as short, in characters")
    fineweb_max_duplicate_line_chars: Share = Field(0.1, description="greatest share of characters in lines that repeat others")
    fineweb_max_newlines: float = Field(0.3, ge=0, description="most line ends for each word")
    spam_max_repeated: Share = Field(0.2, description="greatest share of characters in runs of ten or more of the same one")
    spam_max_urls: Share = Field(0.3, description="greatest share of characters in web addresses")
    spam_max_digits: Share = Field(0.3, description="greatest share of digits among characters other than white space")
    spam_max_symbols: Share = Field(0.3, description="greatest share of ASCII punctuation among characters other than white space")
    spam_max_upper_case: Share = Field(0.5, description="greatest share of capitals among ASCII letters")
    spam_max_keyword: Share = Field(0.15, description="greatest share of one word of four or more characters, in texts of 50 words")
    spam_max_blobs: Share = Field(0.1, description="greatest share of characters in words of over 40, such as base64")
    code_max_line_chars: int = Field(1000, ge=1, description="longest line, in characters")
    code_max_mean_line_chars: float = Field(100, ge=1, description="greatest mean length of lines, in characters")
    code_min_alphanumeric: Share = Field(0.25, description="least share of letters and digits among characters")
    code_max_generated: int = Field(0, ge=0, description="most remarks in the first five lines that a program wrote the file")


class LanguageSettings(Section):
    """Which languages are kept."""

    identify: bool = Field(True, description="identify languages, for the report and the rules that need them; not of code")
    keep: tuple[str, ...] = Field((), description="ISO 639-1 codes of the languages that are kept; empty keeps all")
    min_confidence: float = Field(
        0.9, ge=0, le=1, description="with keep: confidence from which a language is believed; see its costs in the report"
    )
    sample_bytes: int = Field(
        2048, ge=256, le=1 << 20, description="of a longer document so much is looked at: from its start, its middle and its end"
    )
    fasttext_model: Path | None = Field(
        None, description="fastText model file that identifies instead of the built-in models; its labels are the codes"
    )

    @model_validator(mode="after")
    def _what_is_kept_is_identified(self) -> Self:
        if self.keep and not self.identify:
            raise ValueError("keep names languages, but identify = false; set identify to true, or keep to nothing")
        return self


class QualitySettings(Section):
    """What a document's content must be like, by models that the pipeline trains itself. A source may set thresholds of its own."""

    trusted: str | None = Field(
        None, description="source that the reference model is trained on, and that perplexity does not judge; none measures none"
    )
    reference_tokens: int = Field(
        64 << 20, ge=1024, description="tokens of the trusted source that the reference model is trained on, from its start"
    )
    reference_bits: int = Field(
        22, ge=12, le=28, description="size of the reference model: counters for pairs, and again for triples, as a power of two"
    )
    max_perplexity: float | None = Field(1000.0, ge=1, description="perplexity per token above which a document is dropped")
    min_perplexity: float | None = Field(
        None, ge=1, description="perplexity per token below which a document is dropped: text that repeats itself or is boilerplate"
    )
    max_perplexity_percentile: float | None = Field(
        None, ge=0, le=100, description="keep this share of each source's documents, those of lowest perplexity, in percent"
    )
    min_perplexity_percentile: float | None = Field(
        None, ge=0, le=100, description="drop this share of each source's documents, those of lowest perplexity, in percent"
    )
    good: tuple[Path, ...] = Field((), description="files with examples of wanted text, for the classifier (with bad)")
    bad: tuple[Path, ...] = Field((), description="files with examples of unwanted text, for the classifier (with good)")
    classifier_bits: int = Field(18, ge=10, le=24, description="size of the classifier: number of its weights, as a power of two")
    min_good_probability: float = Field(
        0.5, ge=0, le=1, description="lowest probability of being wanted that keeps a document; good and bad weigh the same"
    )

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if bool(self.good) != bool(self.bad):
            raise ValueError("good and bad: only one of them is set; the classifier needs examples of both")
        for unit in ("perplexity", "perplexity_percentile"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{unit} = {low} is above max_{unit} = {high}; nothing would be kept")
        return self
