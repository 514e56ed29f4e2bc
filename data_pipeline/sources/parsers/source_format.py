"""What every parser uses: the origin of its documents, the content of a file, and the decoding of bytes into text.

Invalid UTF-8 is rejected as a whole, with its first wrong byte; nothing is replaced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from data_pipeline.config import Kind, PrepareConfig, RecordConfig
from data_pipeline.config.text import OF_PROMPT, REASONING, usual_kind, with_input
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.streams import Budget, Readable, marked_encoding

BOM = b"\xef\xbb\xbf"
_MAX_METADATA_CHARS = 1 << 16
_SWITCHES = ("on", "off", "true", "false", "yes", "no")
_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedError(ValueError):
    """A line, row or file holds no document."""

    def __init__(self, reason: Reason, detail: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.reason = reason
        self.fields = fields  # of a record that lacks a needed one


@dataclass(frozen=True, slots=True)
class Origin:
    path: str  # relative to its source; a member is `archive.tar!/path/of/member`
    kind: Kind = "prose"
    markup: Literal["plain", "html", "chat"] = "plain"

    def document(self, text: str, line: int, offset: int, metadata: str = "", prompt: str = "") -> Document:
        """Return a document of this file. The prompt precedes the text, without a loss."""
        parts = (len(prompt), len(text)) if prompt else ()
        return Document(prompt + text, self.path, line, offset, self.kind, self.markup, metadata, parts)

    def record(self, fields: Mapping[str, Any], line: int, offset: int, records: RecordConfig) -> Document:
        """Return the document of a record. Its text and its prompt are strings without lone surrogates."""
        known = {*self.needed(records), *self.optional(records), *records.kept_fields}
        unread = tuple(name for name, value in fields.items() if name not in known and value not in (None, "", [], {}))
        document = self._record(fields, line, offset, records)
        return replace(document, unread=unread + document.unread) if unread else document

    def _record(self, fields: Mapping[str, Any], line: int, offset: int, records: RecordConfig) -> Document:
        if self.markup == "chat":
            chat = {name: fields[field] for name, field in chat_fields(records).items()}
            chat |= {name: value for name in records.beside if (value := fields.get(name)) not in (None, "", [])}
            return self.chat(chat, line, offset, metadata_json(fields, records.metadata))
        prompt = "" if records.prompt_field is None else fields[records.prompt_field]
        for name in self.optional(records):
            prompt = with_input(prompt, more) if isinstance(more := fields.get(name), str) else prompt
        metadata = metadata_json(fields, records.kept_fields)
        return self.document(fields[records.text_field], line, offset, metadata, prompt and prompt + records.prompt_end)

    def needed(self, records: RecordConfig) -> dict[str, str]:
        """Return the fields that every record must have, each with the setting that names it."""
        if self.markup == "chat":
            return dict.fromkeys(chat_fields(records).values(), "messages_field")
        prompt = {} if records.prompt_field is None else {records.prompt_field: "prompt_field"}
        return {records.text_field: "text_field"} | prompt

    def optional(self, records: RecordConfig) -> tuple[str, ...]:
        """Return the further fields that a document has, if its record has them."""
        if self.markup == "chat":
            return records.beside
        return OF_PROMPT if records.is_alpaca else ()

    def chat(self, fields: Mapping[str, Any], line: int, offset: int, metadata: str = "") -> Document:
        switches = tuple(name for name, value in fields.items() if _is_switch(name, value))
        text = json.dumps({name: value for name, value in fields.items() if name not in switches}, ensure_ascii=False)
        if has_surrogate(text):
            raise MalformedError(Reason.LONE_SURROGATE, "a message contains a lone surrogate")
        return Document(text, self.path, line, offset, self.kind, "chat", metadata, unread=switches)


@dataclass(frozen=True)
class Content:
    """`blocks` and `file` can be read once, and only one of them."""

    origin: Origin
    config: PrepareConfig
    blocks: Iterator[bytes] = field(repr=False)  # decompressed, from the byte before `start` on if there is one
    budget: Budget  # for data that the parser decompresses itself
    file: Readable | None = None  # for random access; None if it is compressed or in an archive
    num_bytes: int = 0
    start: int = 0  # only documents that begin in [start, end) are read, if the format is divisible
    end: int | None = None
    border: int = 0  # the offset in bytes at which a split by position cuts the file; no document crosses it


@dataclass(frozen=True)
class SourceFormat:
    name: str
    extensions: Mapping[str, Kind | None]  # the kind of text for each; None if the extension does not tell it
    read: Callable[[Content], Iterator[Document | Rejection]]
    markup: Literal["plain", "html", "records"] = "plain"  # of the text; documents from records have that of the settings
    is_divisible: bool = False  # whether a part of a file can be read by itself

    def origin(self, path: str, kind: Kind | None, config: PrepareConfig) -> Origin:
        """Return the origin of a file's documents. HTML is of kind web, unless the source sets another kind."""
        if self.markup != "records":
            markup: Literal["plain", "html", "chat"] = self.markup
        else:
            markup = "chat" if config.chat.is_on and config.has_mask else config.records.markup
        return Origin(path, kind or usual_kind(markup), markup)


def chat_fields(records: RecordConfig) -> dict[str, str]:
    """Return the fields of a conversation or a preference pair: the name in the record for each name in the document."""
    if records.messages_field is not None:
        return {"messages": records.messages_field}
    prompt = {} if records.prompt_field is None else {"prompt": records.prompt_field}
    if records.chosen_field is None or records.rejected_field is None:
        return prompt | {"response": records.text_field}
    return prompt | {"chosen": records.chosen_field, "rejected": records.rejected_field}


def decode(data: bytes, origin: Origin, line: int, offset: int) -> Document | Rejection:
    """Return the document with the text `data`, or a rejection. A byte order mark at offset 0 is removed."""
    text = data.removeprefix(BOM) if offset == 0 else data
    try:
        return origin.document(text.decode("utf-8"), line, offset)
    except UnicodeDecodeError as error:
        bad_line = line + text.count(b"\n", 0, error.start)
        detail, first = explain_bytes(text, error), max(error.start - 40, 0)
        return Rejection.of_bytes(Reason.INVALID_UTF8, origin.path, bad_line, text, detail, first=first)


def explain_bytes(data: bytes, error: UnicodeDecodeError) -> str:
    if (encoding := marked_encoding(data)) is not None:
        return f"this is {encoding.upper()}; convert it to UTF-8"
    return f"byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason}); convert the file to UTF-8"


def has_surrogate(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def metadata_json(fields: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return compact JSON with sorted keys, or "". Strings up to 65,536 characters, true, false and finite numbers are kept."""
    kept = {name: value for name in names if _is_plain(value := fields.get(name))}
    if not kept:
        return ""
    text = json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace").decode() if has_surrogate(text) else text


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_METADATA_CHARS
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_switch(name: str, value: Any) -> bool:
    """Return whether a field named as reasoning only says whether there is any, as in Nemotron's data."""
    return name in REASONING and (isinstance(value, bool) or (isinstance(value, str) and value.lower() in _SWITCHES))
