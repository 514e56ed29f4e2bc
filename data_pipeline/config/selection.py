from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import AlsoCalled, Frequent, OnlyIf, ShapesData, ShapesDataByContent, ShapesDataIfChanged
from common.settings.model import Section
from data_pipeline.config.text import KINDS
from data_pipeline.heuristics.rule import Share

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")  # special tokens, as Qwen and CodeGemma write them


class DedupConfig(Section):
    """Detection of duplicates and of benchmark text."""

    exact: Annotated[ShapesData[bool], AlsoCalled("dedup deduplicate")] = Field(
        True, description="Whether a document is dropped if it equals an earlier one, apart from the amount of white space."
    )
    near: Annotated[ShapesData[bool], Frequent("false", 10), AlsoCalled("dedup deduplicate")] = Field(
        True, description="Whether a document is dropped if it is nearly the same as an earlier one (MinHash)."
    )
    threshold: ShapesData[float] = Field(
        0.8, ge=0.3, le=1, description="Share of common shingles (Jaccard similarity) from which two documents are near duplicates."
    )
    shingle_words: ShapesData[int] = Field(5, ge=1, le=64, description="Number of words in a shingle.")
    num_hashes: ShapesData[int] = Field(
        128, ge=16, le=1024, description="Number of hashes in a MinHash signature. More hashes compare fewer dissimilar pairs."
    )
    max_cluster: Annotated[ShapesData[int], OnlyIf("dedup.near")] = Field(
        100_000, ge=1, description="Most near duplicates of one document that are dropped. Further ones are kept and counted."
    )
    alarm_fraction: Annotated[ShapesData[Share], OnlyIf("dedup.exact")] = Field(
        0.5, description="Share of a source's documents above which dropped duplicates cause a warning."
    )
    benchmarks: ShapesDataByContent[tuple[Path, ...]] = Field(
        (), description="Benchmark files (.jsonl, .txt). Documents that share text with them are dropped."
    )
    benchmark_words: Annotated[ShapesData[int], OnlyIf("dedup.benchmarks")] = Field(
        13, ge=4, le=64, description="Number of consecutive words that count as text shared with a benchmark."
    )
    benchmark_overlaps: Annotated[ShapesData[int], OnlyIf("dedup.benchmarks")] = Field(
        1, ge=1, description="Number of such runs of words from which a document is dropped."
    )
    benchmark_alarm_fraction: Annotated[ShapesData[Share], OnlyIf("dedup.benchmarks")] = Field(
        0.05, description="Share of a source's text in bytes above which dropped benchmark text causes a warning."
    )

    @model_validator(mode="after")
    def _near_includes_exact(self) -> Self:
        if self.near and not self.exact:
            raise ValueError(
                "dedup.near = true finds equal documents too, but dedup.exact = false; set near to false too, or exact to true"
            )
        return self


class BalanceConfig(Section):
    """Share of each group of documents in the training tokens."""

    by: ShapesData[Literal["none", "source", "kind", "language", "field"]] = Field(
        "none", description="Groups whose shares are balanced: sources, kinds of text, languages, or values of a metadata field."
    )
    field: ShapesData[str | None] = Field(
        None, description="Metadata field with the groups (by = field), one of records.metadata. none: another `by`."
    )
    weights: Annotated[ShapesData[dict[str, float]], OnlyIf("balance.by != none")] = Field(
        default_factory=dict,
        description="Share of the training tokens of each group, relative to the others; not named: 1. Only a recipe can hold it.",
    )
    max_repeats: Annotated[ShapesData[float], OnlyIf("balance.by != none")] = Field(
        1.0,
        ge=1,
        le=100,
        description="Times that a document may be used if its group has too little text; 1: the other groups are cut.",
    )

    @model_validator(mode="after")
    def _field_is_named(self) -> Self:
        if (self.by == "field") != (self.field is not None):
            raise ValueError(
                "balance.by = field, but balance.field is not set; set it to the name of a metadata field"
                if self.field is None
                else f"balance.field = {self.field} has no effect if balance.by = {self.by}; set balance.by = field, or drop it"
            )
        unknown = [name for name in self.weights if name not in KINDS] if self.by == "kind" else []
        if unknown:
            raise ValueError(f"weights.{unknown[0]} is not a kind of text; the kinds are {', '.join(KINDS)}")
        if negative := [name for name, weight in self.weights.items() if not 0 <= weight < float("inf")]:
            raise ValueError(f"weights.{negative[0]} = {self.weights[negative[0]]}: a weight must be a finite number, 0 or greater")
        return self


class AugmentConfig(Section):
    """Random changes to training documents. Off by default."""

    seed: Annotated[ShapesData[int], OnlyIf("augment.subword_rate or augment.fim_rate or augment.synonym_rate")] = Field(
        0, ge=0, lt=1 << 63, description="Seed that decides which documents are changed, and where."
    )
    subword_rate: ShapesData[Share] = Field(
        0.0, description="Share of documents whose words are cut into tokens at random (bpe, unigram)."
    )
    subword_alpha: Annotated[ShapesData[float], OnlyIf("augment.subword_rate")] = Field(
        0.1,
        gt=0,
        lt=1,
        description="Parameter of these cuts. bpe: share of merges left out; unigram: exponent of a segmentation's probability.",
    )
    fim_rate: ShapesData[Share] = Field(0.0, description="Share of code documents that are rearranged for fill-in-the-middle.")
    fim_spm_rate: Annotated[ShapesData[Share], OnlyIf("augment.fim_rate")] = Field(
        0.5, description="Share of these documents with the suffix first (SPM). The others have the prefix first."
    )
    synonyms: Annotated[ShapesDataByContent[Path | None], OnlyIf("augment.synonym_rate")] = Field(
        None,
        description="File with synonyms. .tsv: a word and its synonyms on each line, between tabs; .json: an object of lists. "
        "none: no file.",
    )
    synonym_rate: ShapesData[Share] = Field(
        0.0, description="Share of the words with synonyms that are replaced, in prose and web text."
    )

    @model_validator(mode="after")
    def _synonyms_are_named(self) -> Self:
        if self.synonym_rate > 0 and self.synonyms is None:
            raise ValueError(f"synonym_rate = {self.synonym_rate}, but synonyms is not set; name a file, or set synonym_rate to 0")
        return self

    @property
    def is_on(self) -> bool:
        return any((self.fim_rate, self.synonym_rate, self.subword_rate))

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return FIM_TOKENS if self.fim_rate > 0 else ()


class SplitConfig(Section):
    """Choice of the documents that are held out for validation."""

    by: ShapesData[Literal["content", "tail"]] = Field(
        "content",
        description="Choice of validation documents. content: by the digest of the text, so equal texts are in the same split; "
        "tail: the last part of each file.",
    )
    by_name: ShapesDataIfChanged[bool] = Field(
        True,
        description="Whether the names of files and folders (train, validation, test, …) and a data set's card tell its splits.",
    )
    val_fraction: Annotated[
        ShapesData[float], Frequent("0.05", 9), AlsoCalled("val_split val_ratio validation_split test_size val_fraction")
    ] = Field(0.05, gt=0, lt=1, description="Share of the text that is held out for validation.")
    min_val_documents: ShapesData[int] = Field(
        4, ge=0, description="Fewest validation documents; with by = content at most a tenth of all documents."
    )
    seed: Annotated[ShapesData[int], OnlyIf("split.by = content")] = Field(
        0, ge=0, lt=1 << 63, description="Seed that decides which documents are held out (by = content)."
    )
