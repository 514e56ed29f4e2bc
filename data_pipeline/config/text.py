"""Settings of how files become clean documents."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Section

__all__ = ["BUILTIN", "KINDS", "CleanSettings", "HtmlSettings", "Kind", "RecordSettings", "TextSettings"]

BUILTIN = "builtin"
"""The word that stands in `sources` for the text of the interpreter's own standard library."""
Kind = Literal["prose", "web", "code"]
"""What sort of text a document is; it decides which rules make sense for it."""
KINDS: tuple[Kind, ...] = ("prose", "web", "code")
"""The kinds by their numbers in tables."""
LineRule = Literal["notices", "javascript", "unpunctuated", "few-words", "long-word"]


class TextSettings(Section):
    """How plain text files become documents."""

    documents: Literal["file", "paragraphs", "chunks"] = Field(
        "file", description="what one document is: a whole file, a paragraph (between blank lines), or a chunk of lines"
    )
    chunk_chars: int = Field(4096, ge=64, le=1 << 24, description="length of a chunk, in characters, cut at the next line end")


class RecordSettings(Section):
    """How JSON Lines, CSV, TSV and Parquet become documents."""

    text_field: str = Field("text", min_length=1, description="name of the field or column that holds the text")
    metadata: tuple[str, ...] = Field((), description="names of fields that are kept with each document: strings and numbers")
    quotes: bool = Field(True, description="CSV and TSV: double quotes enclose fields; false takes a quote as part of the text")
    markup: Literal["plain", "html"] = Field("plain", description="html: the field holds HTML, which is turned into text")


class HtmlSettings(Section):
    """How HTML becomes text."""

    extract: Literal["main", "all"] = Field(
        "main", description="main: the main content without navigation and other boilerplate; all: everything but the tags"
    )


class CleanSettings(Section):
    """What is put in order in a document, and how long it must be."""

    unicode: Literal["nfc", "none"] = Field("nfc", description="Unicode normalisation, not of code; none leaves all as it is")
    mojibake: bool = Field(True, description="repair text, not code, that was once read in a wrong encoding and shows it")
    drop_lines: tuple[LineRule, ...] = Field(
        (),
        description="lines that are removed, as C4 does: notices (cookies, terms of use), javascript, unpunctuated (no terminal "
        "punctuation), few-words (under 5), long-word (one of over 1000 characters); not in code",
    )
    repeats: Literal["lines", "paragraphs"] = Field("lines", description="what repeat_window compares")
    repeat_window: int = Field(
        0,
        ge=0,
        description="a line (or paragraph) that equals one of so many before it is removed, but not in code; 0 removes none",
    )
    repeat_min_chars: int = Field(20, ge=1, description="shortest line (or paragraph) that repeat_window removes, in characters")
    min_chars: int = Field(20, ge=1, description="shortest document that is kept, in characters; 10 to 50 is usual")
    max_chars: int | None = Field(None, ge=1, description="longest document that is kept, in characters; none keeps all")

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} is below min_chars = {self.min_chars}; raise it or lower min_chars")
        return self


Share = Annotated[float, Field(ge=0, le=1)]
