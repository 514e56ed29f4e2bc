"""Settings of which documents are used, how often, and in which split."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Section
from data_pipeline.config.text import KINDS

__all__ = ["FIM_TOKENS", "AugmentSettings", "BalanceSettings", "DedupSettings", "SplitSettings"]

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
"""Names of the special tokens of fill-in-the-middle, as Qwen and CodeGemma write them."""


class DedupSettings(Section):
    """Which documents count as the same."""

    exact: bool = Field(True, description="drop documents whose letters and digits equal those of an earlier one")
    near: bool = Field(True, description="drop documents that are nearly the same as an earlier one (MinHash)")
    threshold: float = Field(
        0.8, ge=0.3, le=1, description="share of common shingles (Jaccard similarity) from which two documents are nearly the same"
    )
    shingle_words: int = Field(5, ge=1, le=64, description="words in a shingle")
    num_hashes: int = Field(128, ge=16, le=1024, description="numbers in a MinHash signature; more of them compare fewer in vain")
    max_cluster: int = Field(
        100_000, ge=1, description="near-duplicates that are dropped in favour of one document; those beyond are kept, and counted"
    )
    alarm_fraction: float = Field(
        0.5, ge=0, le=1, description="share of a source's documents that may go as duplicates without an alarm"
    )
    benchmarks: tuple[Path, ...] = Field((), description="benchmark files (.jsonl, .txt) whose text must not be trained on")
    benchmark_words: int = Field(13, ge=4, le=64, description="words in a run that a document shares with a benchmark")
    benchmark_overlaps: int = Field(1, ge=1, description="fewest shared runs for which a document is dropped")

    @model_validator(mode="after")
    def _near_includes_exact(self) -> Self:
        if self.near and not self.exact:
            raise ValueError(
                "dedup.near = true finds equal documents too, but dedup.exact = false; set near to false too, or exact to true"
            )
        return self


class BalanceSettings(Section):
    """How much of each source or class is taken for training."""

    by: Literal["none", "source", "kind", "language", "field"] = Field(
        "none", description="what the shares are of: sources, kinds of text, languages, or the values of a metadata field"
    )
    field: str | None = Field(None, description="the metadata field (by = field); it must be among records.metadata")
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="share of the training tokens of each, relative to the others; 1 where none is given; in recipes only",
    )
    max_repeats: float = Field(
        1.0, ge=1, le=100, description="how often a document may be taken where there is too little; 1 takes less of the others"
    )

    @model_validator(mode="after")
    def _field_is_named(self) -> Self:
        if (self.by == "field") != (self.field is not None):
            raise ValueError(f"by = {self.by} and field = {self.field} do not agree; set both, or neither")
        unknown = [name for name in self.weights if name not in KINDS] if self.by == "kind" else []
        if unknown:
            raise ValueError(f"weights.{unknown[0]} is no kind of text; there are {', '.join(KINDS)}")
        if negative := [name for name, weight in self.weights.items() if not 0 <= weight < float("inf")]:
            raise ValueError(f"weights.{negative[0]} = {self.weights[negative[0]]}: a weight is a finite number from 0")
        return self


class AugmentSettings(Section):
    """Changes to training documents. Off by default."""

    seed: int = Field(0, ge=0, lt=1 << 63, description="another seed changes other documents in other places")
    subword_rate: float = Field(
        0.0, ge=0, le=1, description="share of documents whose words are cut into pieces at random (bpe, unigram)"
    )
    subword_alpha: float = Field(
        0.1, gt=0, lt=1, description="bpe: share of the joins left out; unigram: how strongly likelier pieces are preferred"
    )
    fim_rate: float = Field(0.0, ge=0, le=1, description="share of code documents that are turned into fill-in-the-middle")
    fim_spm_rate: float = Field(
        0.5, ge=0, le=1, description="share of those with the suffix first (SPM); the others have the prefix first"
    )
    synonyms: Path | None = Field(
        None, description="file with synonyms: a word and its synonyms on each line between tabs (.tsv), or a JSON object of lists"
    )
    synonym_rate: float = Field(0.0, ge=0, le=1, description="share of the listed words that are replaced, in prose and web text")

    @model_validator(mode="after")
    def _synonyms_are_named(self) -> Self:
        if self.synonym_rate > 0 and self.synonyms is None:
            raise ValueError(f"synonym_rate = {self.synonym_rate}, but synonyms is not set; name a file, or set synonym_rate to 0")
        return self

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that a tokenizer must have for this."""
        return FIM_TOKENS if self.fim_rate > 0 else ()


class SplitSettings(Section):
    """Which documents are held out for validation."""

    by: Literal["content", "tail"] = Field(
        "content",
        description="content: by the digest of the text, so equal texts fall on one side; tail: the last part of each file",
    )
    val_fraction: float = Field(0.05, gt=0, lt=1, description="share of the text that is held out")
    min_val_documents: int = Field(
        4, ge=0, description="documents that are held out at least, but (content) no more than a tenth of a small folder, and one"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="another seed holds out other documents (content)")
