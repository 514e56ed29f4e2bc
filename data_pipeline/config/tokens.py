from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import AlsoCalled, Frequent, OnlyIf, ShapesData, ShapesDataByContent, ShapesDataIfChanged
from common.settings.model import Section
from common.text import named_values

_MIB = 1 << 20
_OWN = OnlyIf("not tokenizer.path")
_TRAINED = OnlyIf("tokenizer.kind = bpe or tokenizer.kind = unigram")


def _name_of(role: str) -> Any:
    return Field(None, description=f"Name of the {role} token in the tokenizer at path; none: its files name it.")


class TokenizerConfig(Section):
    """The tokenizer: one that is trained, or a supplied one."""

    kind: Annotated[
        ShapesData[Literal["bpe", "unigram", "char", "byte"]],
        _OWN,
        Frequent("bpe", 7),
        AlsoCalled("tokenizer tokenizer_path tokenizer_file tokenizer_type"),
    ] = Field("bpe", description="Kind of tokenizer. bpe and unigram are SentencePiece models; char and byte need no training.")
    vocab_size: Annotated[
        ShapesData[Annotated[int, Field(ge=264, le=1 << 20)] | Literal["auto"]],
        _OWN,
        _TRAINED,
        Frequent("8192", 6),
        AlsoCalled("vocab vocab_size n_vocab"),
    ] = Field(32_000, description="Number of tokens in the vocabulary of bpe and unigram; auto: chosen from the amount of text.")
    add_bos: ShapesData[bool] = Field(
        True,
        description="Whether each document begins with the bos token. If it is not set, a tokenizer at path that puts none before "
        "a text has none here.",
    )
    add_eos: ShapesData[bool] = Field(True, description="Whether each document ends with the eos token.")
    sample_bytes: Annotated[ShapesData[int], _OWN, _TRAINED] = Field(
        32 * _MIB, ge=1024, description="Bytes of training text that train the tokenizer, drawn evenly from all sources."
    )
    character_coverage: Annotated[ShapesData[float], _OWN, _TRAINED] = Field(
        0.9995, ge=0.98, le=1, description="Share of the text's characters that get a token each. The others are encoded as bytes."
    )
    train_threads: Annotated[ShapesData[int], _OWN, _TRAINED] = Field(
        4, ge=1, le=1024, description="Threads that train the tokenizer. Another number gives another unigram tokenizer."
    )
    extra_special: ShapesData[tuple[str, ...]] = Field(
        (), description="More special tokens, such as <|user|>, which no text can produce. Not with `path`."
    )
    path: Annotated[ShapesDataByContent[Path | None], AlsoCalled("tokenizer tokenizer_path tokenizer_file")] = Field(
        None,
        description="Tokenizer that is used as it is: a tokenizer.json, a SentencePiece .model, or a folder with one, such as that "
        "of a run or of prepared data. none: one is trained.",
    )
    pad_token: ShapesData[str | None] = _name_of("pad")
    unk_token: ShapesData[str | None] = _name_of("unk")
    bos_token: ShapesData[str | None] = _name_of("bos")
    eos_token: ShapesData[str | None] = _name_of("eos")

    @model_validator(mode="after")
    def _tokens_have_names(self) -> Self:
        if self.chosen_names and self.path is None:
            raise ValueError(
                f"{next(iter(self.chosen_names))}_token is set, but path is not; only a supplied tokenizer has other names, so "
                "remove it"
            )
        if self.path is not None and self.extra_special:
            raise ValueError(
                "extra_special and path are both set; a supplied tokenizer is not changed, so add the tokens to its file"
            )
        reserved = {"<pad>", "<unk>", "<s>", "</s>"}
        for name in self.extra_special:
            if not name.strip() or any(character.isspace() or character == "\u2581" for character in name) or name in reserved:
                raise ValueError(f"extra_special: {name!r} is empty, holds a space, or is one of {sorted(reserved)}; rename it")
        if len(set(self.extra_special)) < len(self.extra_special):
            raise ValueError("extra_special names a token twice; remove one of them")
        return self

    @property
    def chosen_names(self) -> dict[str, str]:
        """The names of special tokens that are set, by role."""
        return {role: name for role in ("pad", "unk", "bos", "eos") if (name := getattr(self, f"{role}_token")) is not None}

    @property
    def is_trained(self) -> bool:
        return self.path is None and self.kind != "byte"


CHAT_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
}
"""The named chat templates, and the special tokens of each besides bos and eos."""


class ChatConfig(Section):
    """The text form of conversations and preference pairs."""

    template: ShapesDataIfChanged[Literal["none", "tokenizer", "chatml", "llama3", "plain"]] = Field(
        "none",
        description="Chat template that turns messages, and prompts with their texts, into text. tokenizer: the one in the folder "
        "at tokenizer.path; chatml, llama3, plain: a built-in one; none: no record is a conversation.",
    )
    too_long: Annotated[ShapesDataIfChanged[Literal["truncate", "reject"]], OnlyIf("chat.template != none")] = Field(
        "truncate",
        description="Treatment of a conversation with more tokens than a row. truncate: its end is left out; reject: all of it is. "
        "A longer preference pair is always rejected.",
    )

    answers: Annotated[ShapesDataIfChanged[Literal["all", "last"]], OnlyIf("chat.template != none")] = Field(
        "all", description="Answers of a conversation that have a loss, unless their weight is 0."
    )
    unused_fields: Annotated[ShapesDataIfChanged[Literal["reject", "keep"]], OnlyIf("chat.template != none")] = Field(
        "reject",
        description="Treatment of a conversation with text, calls of tools, tools or documents that the template leaves out. keep: "
        "it is only counted, like one with other such fields.",
    )
    arguments: Annotated[ShapesDataIfChanged[tuple[str, ...]], OnlyIf("chat.template != none")] = Field(
        (),
        description="What the template gets besides, such as enable_thinking=false. A record's chat_template_kwargs come first.",
    )

    @model_validator(mode="after")
    def _arguments_have_names(self) -> Self:
        try:
            named_values(self.arguments)
        except ValueError as error:
            raise ValueError(f"arguments: {error}") from None
        return self

    @property
    def is_on(self) -> bool:
        return self.template != "none"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of a named template. A tokenizer that is trained gets them."""
        return CHAT_TOKENS.get(self.template, ())


class PackingConfig(Section):
    """The placement of documents in rows and shards."""

    method: ShapesData[Literal["best-fit", "greedy", "one-per-row"]] = Field(
        "best-fit",
        description="How documents fill rows. best-fit: only documents longer than a row are cut; greedy: rows are filled in "
        "order, and each cuts the document at its end; one-per-row: a row has one document, or a piece of one.",
    )
    keep_tokens: ShapesData[bool] = Field(
        True,
        description="Whether the tokens of documents are kept, for `repack`, `leaks` and `inspect --document`. They take as much "
        "space as the shards.",
    )
    window_tokens: ShapesData[int] = Field(
        8 << 20, ge=1024, le=1 << 34, description="Tokens that are packed together. More need more memory."
    )
    shard_bytes: ShapesData[int] = Field(
        64 * _MIB, ge=4096, le=1 << 34, description="Size at which a shard ends, in bytes of tokens."
    )
