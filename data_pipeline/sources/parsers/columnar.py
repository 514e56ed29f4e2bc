"""Read Parquet and Arrow files: one row is one document. A confined process decodes each file, which may be hostile."""

from __future__ import annotations

import io
import json
import struct
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from data_pipeline.config import LimitConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.execution.confined import ConfinedProgram, ProgramEndedError, refuse_lower_limits
from data_pipeline.sources.parsers.fields import missing_field
from data_pipeline.sources.parsers.source_format import Content, Origin, SourceFormat, chat_fields, explain_bytes
from data_pipeline.sources.streams import Budget, StreamError, join_blocks

_CHILD = Path(__file__).with_name("columnar_child.py")
_SILENCE_S = 600.0  # a batch of rows takes milliseconds, so a child that is silent longer is in an endless loop
_MAX_READ_BYTES = 1 << 20
_MAX_NAMES = 1000  # of columns that are named in messages
_MAX_EXTRA_BYTES = 64 << 20  # of short texts and metadata in a message that also holds a text and a prompt of the maximum length
_FAILURES = {
    -1: (Reason.TEXT_NOT_A_STRING, "null"),
    -2: (Reason.FIELD_TOO_LARGE, "longer than limits.max_line_bytes"),
    -3: (Reason.INVALID_UTF8, "a message is not UTF-8"),
}


def _read(content: Content, file_format: str) -> Iterator[Document | Rejection]:
    origin, records, limits = content.origin, content.config.records, content.config.limits
    file, num_bytes, budget = content.file, content.num_bytes, Budget(limits, lambda: content.num_bytes)
    if file is None:
        data, is_whole = join_blocks(content.blocks, limits.max_document_bytes)  # the index is at the end
        if not is_whole:
            detail = f"a compressed or archived .{file_format} file over limits.max_document_bytes; unpack it first"
            raise StreamError(Reason.FILE_TOO_LARGE, detail)
        file, num_bytes, budget = io.BytesIO(data), len(data), content.budget
    request = {
        "format": file_format,
        "bytes": num_bytes,
        "needed": origin.needed(records),
        "chat_fields": chat_fields(records) if origin.markup == "chat" else None,
        "optional": list(origin.optional(records)),
        "metadata": list(records.kept_fields),
        "max_names": _MAX_NAMES,
        "max_text_bytes": limits.max_line_bytes,
        "memory_bytes": limits.reader_memory_bytes,
    }
    corrupt = Reason(f"corrupt-{file_format}")
    row = 0
    unread: tuple[str, ...] = ()
    with closing(ConfinedProgram(_CHILD, _SILENCE_S)) as child:
        child.write(json.dumps(request).encode() + b"\n")
        for letter, body in _messages(child, limits, corrupt):
            if letter == b"R":
                offset, size = struct.unpack("<qq", body) if len(body) == 16 else (-1, 0)
                if not (0 <= offset <= num_bytes and 0 <= size <= _MAX_READ_BYTES):
                    raise StreamError(corrupt, f"its reader requested {size} bytes at offset {offset}, of {num_bytes}")
                file.seek(offset)
                data = file.read(size)
                child.write(struct.pack("<q", len(data)) + data)
            elif letter == b"B":
                for one in _rows(body, corrupt):
                    row += 1
                    budget.charge(max(sum(len(text) for text in one[:2] if isinstance(text, bytes)), 1))
                    found = _document(*one, origin, row, records, corrupt)
                    yield replace(found, unread=unread + found.unread) if isinstance(found, Document) else found
            elif letter == b"U":
                unread = tuple(body.decode("utf-8", "backslashreplace").split("\0")[:_MAX_NAMES]) if body else ()
            elif letter == b"E":
                reason, _, detail = body.decode("utf-8", "backslashreplace").partition("\0")
                if reason == Reason.READER_MEMORY:
                    refuse_lower_limits(limits.reader_memory_bytes)
                if reason == Reason.NO_TEXT_FIELD:
                    raise _missing(detail, corrupt)
                raise StreamError(Reason(reason) if reason in list(Reason) else corrupt, detail)


PARQUET = SourceFormat("parquet", {".parquet": None}, partial(_read, file_format="parquet"), markup="records")
ARROW = SourceFormat("arrow", {".arrow": None, ".feather": None}, partial(_read, file_format="arrow"), markup="records")


def _document(
    text: bytes | int, prompt: bytes | int, metadata: str, origin: Origin, row: int, records: RecordConfig, corrupt: Reason
) -> Document | Rejection:
    found = []
    for value in (text, prompt):
        if isinstance(value, int):
            reason, detail = _FAILURES.get(value, (corrupt, "no text"))
            return Rejection(reason, origin.path, row, detail)
        try:
            found.append(value.decode("utf-8"))
        except UnicodeDecodeError as error:
            detail, first = explain_bytes(value, error), max(error.start - 40, 0)
            return Rejection.of_bytes(Reason.INVALID_UTF8, origin.path, row, value, detail, first=first)
    if origin.markup == "chat":
        return origin.chat(json.loads(found[0]), row, 0, metadata)  # the library allows at most 100 levels
    return origin.document(found[0], row, 0, metadata, found[1] and found[1] + records.prompt_end)


def _missing(detail: str, corrupt: Reason) -> StreamError:
    try:
        found = json.loads(detail)
        error = missing_field("column", found["name"], list(map(str, found["fields"])), found["setting"])
    except (ValueError, KeyError, TypeError):
        return StreamError(corrupt, "its reader sent an unknown message")
    return StreamError(error.reason, str(error), error.fields)


def _rows(body: bytes, corrupt: Reason) -> Iterator[tuple[bytes | int, bytes | int, str]]:
    """Yield text, prompt and metadata of each row in a message. A key of `_FAILURES` replaces a missing text or prompt."""
    num_rows = int.from_bytes(body[:8], "little", signed=True)
    if not 8 <= 8 + 24 * num_rows <= len(body):
        raise StreamError(corrupt, f"its reader sent {num_rows} rows in {len(body)} bytes")
    lengths = array("q", body[8 : 8 + 24 * num_rows])
    columns: list[list[bytes | int]] = []
    position = 8 + 24 * num_rows
    for first in range(0, 3 * num_rows, num_rows or 1):
        columns.append([])
        for length in lengths[first : first + num_rows]:
            columns[-1].append(body[position : position + length] if length >= 0 else length)
            position += max(length, 0)
    for text, prompt, metadata in zip(*columns, strict=True):
        yield text, prompt, metadata.decode("utf-8", "backslashreplace") if isinstance(metadata, bytes) else ""


def _messages(child: ConfinedProgram, limits: LimitConfig, corrupt: Reason) -> Iterator[tuple[bytes, bytes]]:
    letter, max_bytes = b"", 2 * limits.max_line_bytes + _MAX_EXTRA_BYTES
    try:
        while letter not in (b"E", b"Z"):
            letter, length = struct.unpack("<cq", child.read(9))
            if not 0 <= length <= max_bytes:
                raise StreamError(corrupt, f"its reader sent a message of {length} bytes")
            yield letter, child.read(length)
    except ProgramEndedError as error:
        refuse_lower_limits(limits.reader_memory_bytes)
        raise StreamError(corrupt, f"its reader {error}") from None
