"""Settings of the tokenizer and of packing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Section

__all__ = ["PackingSettings", "TokenizerSettings"]

_MIB = 1 << 20


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
    extra_special: tuple[str, ...] = Field(
        (), description="names of further special tokens, such as <|user|>, which no text can produce; not with path"
    )
    path: Path | None = Field(
        None, description="a tokenizer made elsewhere, used as it is: tokenizer.json, a SentencePiece .model, or a folder with one"
    )
    pad_token: str | None = Field(None, description="name of the pad token (path), where the tokenizer's files do not say it")
    unk_token: str | None = Field(None, description="name of the unk token (path)")
    bos_token: str | None = Field(None, description="name of the bos token (path)")
    eos_token: str | None = Field(None, description="name of the eos token (path)")

    @model_validator(mode="after")
    def _tokens_have_names(self) -> Self:
        named = {role: name for role in ("pad", "unk", "bos", "eos") if (name := getattr(self, f"{role}_token")) is not None}
        if named and self.path is None:
            raise ValueError(f"{next(iter(named))}_token is set, but path is not; a tokenizer of our own has its names fixed")
        if self.path is not None and self.extra_special:
            raise ValueError("extra_special and path are both set; a supplied tokenizer is used as it is, so add them to its file")
        reserved = {"<pad>", "<unk>", "<s>", "</s>"}
        for name in self.extra_special:
            if not name.strip() or any(character.isspace() or character == "\u2581" for character in name) or name in reserved:
                raise ValueError(f"extra_special: {name!r} is empty, holds a space, or is one of {sorted(reserved)}; rename it")
        if len(set(self.extra_special)) < len(self.extra_special):
            raise ValueError("extra_special names a token twice; name each once")
        return self


class PackingSettings(Section):
    """How documents share rows."""

    method: Literal["best-fit", "greedy", "one-per-row"] = Field(
        "best-fit",
        description="best-fit cuts only documents longer than a row; greedy fills each row in order and cuts what does not fit; "
        "one-per-row pads each",
    )
    keep_tokens: bool = Field(
        True, description="keep the tokens by document too, for `repack`, `leaks` and `inspect --document`; as large as the shards"
    )
    window_tokens: int = Field(
        8 << 20, ge=1024, le=1 << 34, description="tokens that are packed together, in the order of the input; bounds memory"
    )
    shard_bytes: int = Field(64 * _MIB, ge=4096, le=1 << 34, description="size at which a shard is closed, in bytes of tokens")
