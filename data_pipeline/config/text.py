from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import AlsoCalled, Frequent, NoEffectOnResults, OnlyIf, ShapesData, ShapesDataIfChanged
from common.settings.model import Section
from data_pipeline.heuristics.rule import Share

_MIB = 1 << 20
BUILTIN = "builtin"  # the word in `sources` that stands for the built-in corpus: the text of Python's standard library
Kind = Literal["prose", "web", "code"]  # kind of a document. It decides which filters apply to the document.
KINDS: tuple[Kind, ...] = ("prose", "web", "code")  # the kinds, in the order of their numbers in tables
OF_CONVERSATION = ("system", "system_prompt", "tools", "functions", "documents", "chat_template_kwargs")
"""Fields of a record that belong to its conversation, beside those that the settings name."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields with the reasoning of an answer, in its message or beside a response."""
LABELS = ("label", "kto_tag")
"""Fields that say whether an answer is a good one, as for KTO. The first one says it beside a response only."""
OF_PROMPT = ("input", "context")
"""Fields of a record that belong to a prompt of one of `_INSTRUCTIONS`, as in Alpaca's form."""
_INSTRUCTIONS = ("instruction", "question", "query")
LineRule = Literal["notices", "javascript", "unpunctuated", "few-words", "long-word"]


def with_input(instruction: str, more: str) -> str:
    """Return the prompt of a record in Alpaca's form."""
    return f"{instruction}\n\n{more}" if more else instruction


def usual_kind(markup: str) -> Kind:
    """Return the kind of documents whose source names none."""
    return "web" if markup == "html" else "prose"


class TextConfig(Section):
    """Documents from plain text files."""

    documents: Annotated[ShapesData[Literal["file", "paragraphs", "chunks"]], Frequent("paragraphs", 8)] = Field(
        "file",
        description="Part of a text file that is one document: the file, each paragraph between blank lines, or each chunk of "
        "lines.",
    )
    chunk_chars: Annotated[ShapesData[int], OnlyIf("text.documents = chunks")] = Field(
        4096, ge=64, le=1 << 24, description="Length of a chunk in characters. It ends at the next line end."
    )


class RecordConfig(Section):
    """Documents from JSON Lines, CSV, TSV, Parquet and Arrow."""

    text_field: Annotated[ShapesData[str], AlsoCalled("text text_key text_column content_field")] = Field(
        "text", min_length=1, description="Field or column that holds the text."
    )
    prompt_field: ShapesData[str | None] = Field(
        None, min_length=1, description="Field or column with a prompt. It precedes the text and has no loss. none: the text alone."
    )
    prompt_end: Annotated[ShapesData[str], OnlyIf("records.prompt_field")] = Field(
        "\n", description="Characters between prompt and text, which have no loss either."
    )
    label_field: ShapesDataIfChanged[str | None] = Field(
        None,
        min_length=1,
        description="Field or column with the label of a document, for classification. Documents without a label are rejected, and "
        "longer ones than a row are cut. none: no labels.",
    )
    labels: Annotated[ShapesDataIfChanged[tuple[str, ...]], OnlyIf("records.label_field")] = Field(
        (), description="Names of the labels. Documents with another one are rejected. Empty: all labels that occur."
    )
    messages_field: ShapesDataIfChanged[str | None] = Field(
        None,
        min_length=1,
        description="Field or column with the messages of a conversation: objects with role and content, or from and value. It "
        "needs chat.template. none: no conversations.",
    )
    chosen_field: ShapesDataIfChanged[str | None] = Field(
        None,
        min_length=1,
        description="Field or column with the better answer of a preference pair: a text or messages. It needs "
        "rejected_field and chat.template, and prompt_field unless both answers begin with the prompt. none: no pairs.",
    )
    rejected_field: ShapesDataIfChanged[str | None] = Field(
        None, min_length=1, description="Field or column with the worse answer of a preference pair. none: no pairs."
    )
    metadata: ShapesData[tuple[str, ...]] = Field(
        (), description="Fields that are kept with each document: strings, numbers and booleans."
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
        if self.chosen_field is not None and self.rejected_field is not None:
            return tuple(name for name in (self.prompt_field, self.chosen_field, self.rejected_field) if name is not None)
        return ()

    @property
    def beside(self) -> tuple[str, ...]:
        """Fields that belong to a conversation too, if a record has them."""
        of_prompt: tuple[str, ...] = (*OF_PROMPT, "history") if self.is_alpaca else ()
        of_prompt += () if self.prompt_field is None or self.has_pairs else REASONING
        if self.label_field is None and not self.has_pairs:
            of_prompt += LABELS if self.prompt_field is not None else LABELS[1:]
        return tuple(name for name in OF_CONVERSATION + of_prompt if name not in (*self.chat_fields, self.text_field))

    @property
    def is_alpaca(self) -> bool:
        return self.prompt_field in _INSTRUCTIONS

    @property
    def has_pairs(self) -> bool:
        return self.chosen_field is not None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.chosen_field is None) != (self.rejected_field is None):
            raise ValueError("chosen_field and rejected_field name the two answers of a pair; set both or none of them")
        if self.messages_field is not None and self.prompt_field is not None:
            raise ValueError(
                "messages_field and prompt_field are both set, but the messages hold the prompts already; remove prompt_field"
            )
        if (fields := self.chat_fields) and len(set(fields)) < len(fields):
            raise ValueError("prompt_field, chosen_field and rejected_field must name three different fields")
        if (fields or self.prompt_field is not None) and self.markup == "html":
            raise ValueError("prompts, conversations and pairs need markup = plain; turn the HTML into text first")
        if self.prompt_field is not None and self.prompt_field == self.text_field and not self.has_pairs:
            raise ValueError(f"prompt_field and text_field are both {self.text_field!r}; name two fields")
        return self


class HtmlConfig(Section):
    """Text from HTML pages."""

    extract: ShapesData[Literal["main", "all"]] = Field(
        "main", description="Part of a page that becomes text. main: without navigation; all: everything visible."
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
        "unpunctuated, few-words (fewer than 5), long-word (over 1000 characters).",
    )
    repeats: Annotated[ShapesData[Literal["lines", "paragraphs"]], OnlyIf("clean.repeat_window")] = Field(
        "lines", description="Unit of text that repeat_window compares."
    )
    repeat_window: ShapesData[int] = Field(
        0,
        ge=0,
        description="Preceding lines or paragraphs with which each one is compared. An equal one is removed. 0: off. Not in code.",
    )
    repeat_min_chars: Annotated[ShapesData[int], OnlyIf("clean.repeat_window")] = Field(
        20, ge=1, description="Shortest line or paragraph that repeat_window removes, in characters."
    )
    min_chars: ShapesData[int] = Field(20, ge=1, description="Shortest document that is kept, in characters. Usual: 10 to 50.")
    max_chars: ShapesData[int | None] = Field(
        None, ge=1, description="Longest document that is kept, in characters; none: no limit."
    )

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} is below min_chars = {self.min_chars}; raise it or lower min_chars")
        return self


class LimitConfig(Section):
    """Limits for broken or hostile input."""

    max_rejected_fraction: ShapesData[Share] = Field(
        0.05, description="Share of malformed documents among all that were read, above which the preparation stops."
    )
    max_bytes_per_source: ShapesData[int | None] = Field(
        None, ge=1, description="Bytes read from each source, in the order of file names; the last file is read whole; none: all."
    )
    max_line_bytes: ShapesData[int] = Field(
        16 * _MIB, ge=64, description="Longest line, row or field that is read, in bytes. A longer one is rejected."
    )
    max_document_bytes: ShapesData[int] = Field(
        32 * _MIB, ge=64, description="Largest file or paragraph that may be one document, in bytes. A larger one is rejected."
    )
    max_json_depth: ShapesData[int] = Field(
        100, ge=1, le=500, description="Deepest nesting of a JSON line, in levels. A deeper one is rejected."
    )
    max_expansion: ShapesData[int] = Field(
        400, ge=2, description="Decompressed bytes per compressed byte above which the rest of a file is rejected."
    )
    max_decompressed_bytes: ShapesData[int] = Field(
        1 << 40, ge=1024, description="Decompressed bytes above which the rest of a file is rejected."
    )
    max_window_bytes: ShapesData[int] = Field(
        128 * _MIB,
        ge=_MIB,
        le=1 << 31,
        description="Largest window or dictionary of zstd or xz data, in bytes. Other files are rejected.",
    )
    max_archive_members: ShapesData[int] = Field(
        1_000_000, ge=1, description="Number of members above which the rest of an archive is rejected."
    )
    max_member_bytes: ShapesData[int] = Field(
        1 << 34, ge=1024, description="Largest member of an archive that is read, in bytes. A larger one is rejected."
    )
    reader_memory_bytes: ShapesData[int] = Field(
        512 * _MIB,
        ge=64 * _MIB,
        description="Memory for one Parquet file or HTML page, in bytes. A file that needs more is rejected; of a page, only the "
        "tags are removed.",
    )
    outside_links: NoEffectOnResults[bool] = Field(
        False, description="Whether links to files outside a source are followed. false: these files are left out, with a warning."
    )
    allowed_hosts: NoEffectOnResults[tuple[str, ...]] = Field(
        (),
        description="Hosts besides those of the sources to which web addresses may redirect, also private ones: names, addresses, "
        "or patterns such as *.example.org.",
    )
    retries: NoEffectOnResults[int] = Field(
        5, ge=0, le=100, description="Retries in a row after a failed read from a remote store."
    )
    retry_wait_s: Annotated[NoEffectOnResults[float], OnlyIf("limits.retries")] = Field(
        0.5, ge=0, le=60, description="Seconds before the first retry. Each further one waits twice as long."
    )
