"""Every setting of `prepare`, with its unit, bounds and default; how they are read is in `settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from data_pipeline.settings import Section, Settings

__all__ = [
    "BUILTIN",
    "CleanSettings",
    "JsonlSettings",
    "LimitSettings",
    "PackingSettings",
    "PrepareConfig",
    "SplitSettings",
    "TextSettings",
    "TokenizerSettings",
]

BUILTIN = "builtin"
"""The word that stands in `sources` for the text of the interpreter's own standard library."""

_MIB = 1 << 20


class TextSettings(Section):
    """How plain text files become documents."""

    documents: Literal["file", "paragraphs", "chunks"] = Field(
        "file", description="what one document is: a whole file, a paragraph (between blank lines), or a chunk of lines"
    )
    chunk_chars: int = Field(4096, ge=64, le=1 << 24, description="length of a chunk, in characters, cut at the next line end")


class JsonlSettings(Section):
    """How JSON Lines files become documents."""

    text_field: str = Field("text", min_length=1, description="name of the field that holds the text")


class CleanSettings(Section):
    """What is put in order in a document, and how long it must be."""

    unicode: Literal["nfc", "none"] = Field("nfc", description="Unicode normalisation; none leaves every character as it is")
    min_chars: int = Field(20, ge=1, description="shortest document that is kept, in characters; 10 to 50 is usual")
    max_chars: int | None = Field(None, ge=1, description="longest document that is kept, in characters; none keeps all")

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} is below min_chars = {self.min_chars}; raise it or lower min_chars")
        return self


class SplitSettings(Section):
    """Which documents are held out for validation."""

    by: Literal["content", "tail"] = Field(
        "content",
        description="content: by the digest of the text, so equal texts fall on one side; tail: the last part of each file",
    )
    val_fraction: float = Field(0.05, gt=0, lt=1, description="share of the text that is held out")
    min_val_documents: int = Field(4, ge=0, description="fewest validation documents that are accepted")
    seed: int = Field(0, ge=0, lt=1 << 63, description="another seed holds out other documents (content)")


class TokenizerSettings(Section):
    """How text becomes numbers."""

    kind: Literal["bpe", "unigram", "char", "byte"] = Field("bpe", description="bpe and unigram are trained by SentencePiece")
    vocab_size: int = Field(
        32_000, ge=264, le=1 << 20, description="number of tokens (bpe, unigram); char and byte have what the text or bytes need"
    )
    add_bos: bool = Field(True, description="begin every document with the bos token")
    add_eos: bool = Field(True, description="end every document with the eos token")
    sample_bytes: int = Field(
        32 * _MIB, ge=1024, description="training text that bpe and unigram are trained on, in bytes, drawn evenly from all sources"
    )
    character_coverage: float = Field(
        0.9995, ge=0.98, le=1, description="share of characters with a token of their own; the rest are spelt in bytes"
    )
    train_threads: int = Field(
        4, ge=1, le=1024, description="threads of the tokenizer's training; part of its result (unigram), so not the core count"
    )


class PackingSettings(Section):
    """How documents share rows."""

    method: Literal["best-fit", "greedy"] = Field(
        "best-fit",
        description="best-fit cuts only documents longer than a row; greedy fills each row in order and cuts what does not fit",
    )
    window_tokens: int = Field(
        8 << 20, ge=1024, description="tokens that are packed together, in the order of the input; bounds memory"
    )
    shard_bytes: int = Field(64 * _MIB, ge=4096, description="size at which a shard is closed, in bytes of tokens")


class LimitSettings(Section):
    """Budgets for input that is broken or hostile."""

    max_rejected_fraction: float = Field(
        0.05, ge=0, le=1, description="malformed documents tolerated, as a share of all that were read"
    )
    max_bytes_per_source: int | None = Field(
        None, ge=1, description="input taken from each source, in bytes, files in name order, the last one whole; none takes all"
    )
    max_line_bytes: int = Field(16 * _MIB, ge=64, description="longest line that is read; a longer one is rejected unread")
    max_document_bytes: int = Field(64 * _MIB, ge=64, description="largest text file that may be one document")
    max_expansion: int = Field(400, ge=2, description="decompressed bytes per compressed byte at which a file is given up")
    max_decompressed_bytes: int = Field(1 << 40, ge=1024, description="decompressed bytes at which a file is given up")


class PrepareConfig(Settings):
    """Everything `prepare` can be told."""

    environment_prefix: ClassVar[str] = "PREP_"
    recipe_table: ClassVar[str] = "prepare"

    recipe: str | None = Field(None, description="name of a recipe in env/recipes, or a .toml file")
    sources: tuple[str, ...] = Field(
        (), description="folders, files or globs with text; the word builtin is the text of Python's own standard library"
    )
    output: Path = Field(Path("workspace/data"), description="folder that receives the prepared data")
    workers: int | None = Field(
        None, ge=1, le=4096, description="worker processes; none means one per core. Never changes the result"
    )
    if_empty: Literal["error", "builtin"] = Field("error", description="what to do when the sources hold no text")
    keep_rejects: bool = Field(False, description="write a sample of the rejected documents to rejects.jsonl")
    row_length: int = Field(1024, ge=8, le=1 << 20, description="tokens in a row; a row of L tokens has up to L-1 targets")
    partition_bytes: int = Field(16 * _MIB, ge=1024, description="input bytes in one unit of work; small files are put together")
    text: TextSettings = Field(default_factory=TextSettings, description="plain text files (.txt, .md, …)")
    jsonl: JsonlSettings = Field(default_factory=JsonlSettings, description="JSON Lines files (.jsonl, .ndjson)")
    clean: CleanSettings = Field(default_factory=CleanSettings, description="normalisation and length")
    split: SplitSettings = Field(default_factory=SplitSettings, description="training and validation")
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings, description="text to tokens")
    packing: PackingSettings = Field(default_factory=PackingSettings, description="tokens to rows and shards")
    limits: LimitSettings = Field(default_factory=LimitSettings, description="budgets for broken or hostile input")

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if not self.sources and self.if_empty == "error":
            raise ValueError(f"sources is not set; give --sources PATH, or the word {BUILTIN} for the built-in corpus")
        if self.split.by == "tail" and self.text.documents != "chunks":
            raise ValueError(
                f"split.by = tail cuts files by position, but text.documents = {self.text.documents}; "
                "set text.documents to chunks, or split.by to content"
            )
        return self

    @property
    def portable(self) -> dict[str, Any]:
        """The settings that decide the prepared bytes, and nothing that names this machine: no paths, no worker count."""
        values = self.model_dump(mode="json")
        for name in ("recipe", "sources", "output", "workers", "if_empty", "keep_rejects"):
            del values[name]
        return values
