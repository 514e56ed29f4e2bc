from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.conditions import OnlyIf
from common.settings.markers import (
    AlsoCalled,
    Frequent,
    ShapesData,
    ShapesDataIfChanged,
)
from common.settings.model import Section

BUILTIN = "builtin"  # the word in `sources` that stands for the built-in corpus: the text of Python's standard library
Kind = Literal["prose", "web", "code"]  # kind of a document. It decides which filters apply to the document.
KINDS: tuple[Kind, ...] = ("prose", "web", "code")  # the kinds, in the order of their numbers in tables
LineRule = Literal["notices", "javascript", "unpunctuated", "few-words", "long-word"]


class TextConfig(Section):
    """Documents from plain text files."""

    documents: Annotated[ShapesData[Literal["file", "paragraphs", "chunks"]], Frequent("paragraphs", 8)] = Field(
        "file",
        description="Part of a text file that is one document. file: the whole file; paragraphs: each paragraph between blank "
        "lines; chunks: each chunk of lines.",
    )
    chunk_chars: Annotated[ShapesData[int], OnlyIf("text.documents = chunks")] = Field(
        4096, ge=64, le=1 << 24, description="Length of a chunk, in characters. It ends at the next line end."
    )


class RecordConfig(Section):
    """Documents from JSON Lines, CSV, TSV, Parquet and Arrow."""

    text_field: Annotated[ShapesData[str], AlsoCalled("text text_key text_column content_field")] = Field(
        "text", min_length=1, description="Name of the field or column that holds the text."
    )
    prompt_field: ShapesData[str | None] = Field(
        None,
        min_length=1,
        description="Name of the field or column that holds a prompt. The prompt precedes the text, and has no loss in training. "
        "none: the text alone.",
    )
    prompt_end: Annotated[ShapesData[str], OnlyIf("records.prompt_field")] = Field(
        "\n", description="Characters between prompt and text. They have no loss either. See prompt_field."
    )
    label_field: ShapesDataIfChanged[str | None] = Field(
        None,
        min_length=1,
        description="Name of the field or column that holds the label of a document, for classification. Documents without a label "
        "are rejected, and longer ones than a row are cut to it. none: no labels.",
    )
    labels: Annotated[ShapesDataIfChanged[tuple[str, ...]], OnlyIf("records.label_field")] = Field(
        (), description="Names of the labels; documents with another label are rejected. Empty: all labels that occur."
    )
    messages_field: ShapesDataIfChanged[str | None] = Field(
        None,
        min_length=1,
        description="Name of the field or column with the messages of a conversation: a list of objects with role and content, or "
        "with from and value. It needs chat.template. none: the records are no conversations.",
    )
    chosen_field: ShapesDataIfChanged[str | None] = Field(
        None,
        min_length=1,
        description="Name of the field or column with the better answer of a preference pair: a text or messages. It needs "
        "prompt_field, rejected_field and chat.template. none: the records are no pairs.",
    )
    rejected_field: ShapesDataIfChanged[str | None] = Field(
        None, min_length=1, description="Name of the field or column with the worse answer of a preference pair. See chosen_field."
    )
    metadata: ShapesData[tuple[str, ...]] = Field(
        (), description="Names of the fields that are kept with each document: strings, numbers and booleans."
    )
    quotes: ShapesData[bool] = Field(
        True, description="Whether double quotes enclose fields in CSV and TSV. false: a quote is text."
    )
    markup: ShapesData[Literal["plain", "html"]] = Field(
        "plain", description="Form of the text field. html: it is turned into plain text."
    )

    @property
    def kept_fields(self) -> tuple[str, ...]:
        return self.metadata if self.label_field is None else (*self.metadata, self.label_field)

    @property
    def chat_fields(self) -> tuple[str, ...]:
        """The fields of a conversation or a preference pair; none if the records are texts."""
        if self.messages_field is not None:
            return (self.messages_field,)
        if self.chosen_field is not None and self.rejected_field is not None and self.prompt_field is not None:
            return (self.prompt_field, self.chosen_field, self.rejected_field)
        return ()

    @property
    def has_pairs(self) -> bool:
        return self.chosen_field is not None

    @model_validator(mode="after")
    def _fields_of_chats_agree(self) -> Self:
        if (self.chosen_field is None) != (self.rejected_field is None):
            raise ValueError("chosen_field and rejected_field name the two answers of a pair; set both or none of them")
        if self.has_pairs and self.prompt_field is None:
            raise ValueError("chosen_field needs prompt_field, the field with the prompt of both answers; set prompt_field")
        if self.messages_field is not None and self.prompt_field is not None:
            raise ValueError(
                "messages_field and prompt_field are both set, but the messages hold the prompts already; remove prompt_field"
            )
        if (fields := self.chat_fields) and len(set(fields)) < len(fields):
            raise ValueError("prompt_field, chosen_field and rejected_field must name three different fields")
        if fields and self.markup == "html":
            raise ValueError("conversations and pairs need markup = plain; turn the HTML into text first")
        return self

    @model_validator(mode="after")
    def _prompt_is_plain_text(self) -> Self:
        if self.prompt_field is None:
            return self
        if self.markup == "html":
            raise ValueError("prompt_field needs markup = plain; turn the HTML into text first")
        if self.prompt_field == self.text_field and not self.has_pairs:
            raise ValueError(f"prompt_field and text_field are both {self.text_field!r}; name two fields")
        return self


class HtmlConfig(Section):
    """Text from HTML pages."""

    extract: ShapesData[Literal["main", "all"]] = Field(
        "main", description="Part of a page that becomes text. main: the main content, without navigation; all: everything visible."
    )


class CleanConfig(Section):
    """Normalisation of a document, and the length that it must have."""

    unicode: ShapesData[Literal["nfc", "none"]] = Field("nfc", description="Unicode normalisation of prose and web text.")
    mojibake: ShapesData[bool] = Field(
        True, description="Whether prose and web text that was decoded with a wrong encoding is repaired."
    )
    drop_lines: ShapesData[tuple[LineRule, ...]] = Field(
        (),
        description="Lines that are removed from prose and web text, as in C4: notices (cookies, terms of use), javascript, "
        "unpunctuated (no terminal punctuation), few-words (fewer than 5), long-word (a word of over 1000 characters).",
    )
    repeats: Annotated[ShapesData[Literal["lines", "paragraphs"]], OnlyIf("clean.repeat_window")] = Field(
        "lines", description="Unit of text that repeat_window compares."
    )
    repeat_window: ShapesData[int] = Field(
        0,
        ge=0,
        description="Number of preceding lines or paragraphs with which each one is compared. An equal one is removed. 0: off. "
        "Not in code.",
    )
    repeat_min_chars: Annotated[ShapesData[int], OnlyIf("clean.repeat_window")] = Field(
        20, ge=1, description="Shortest line or paragraph that repeat_window removes, in characters."
    )
    min_chars: ShapesData[int] = Field(
        20, ge=1, description="Shortest document that is kept, in characters. Usual values are 10 to 50."
    )
    max_chars: ShapesData[int | None] = Field(
        None, ge=1, description="Longest document that is kept, in characters; none: no limit."
    )

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} is below min_chars = {self.min_chars}; raise it or lower min_chars")
        return self
