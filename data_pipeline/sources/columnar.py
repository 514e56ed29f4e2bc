"""Read Parquet and Arrow files: one row is one document. A confined child process decodes the file, because it may be hostile.

`columnar_child` describes the protocol between the two processes. Each file has its own child, which takes about 0.15 s to start.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from data_pipeline.config import LimitSettings, RecordSettings
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.execution.confined import ConfinedProgram, ProgramEndedError
from data_pipeline.sources.decoding import Origin, explain_bytes
from data_pipeline.sources.streams import Budget, Readable, StreamError

__all__ = ["ColumnarFormat", "read_rows_of_columns"]

_CHILD = Path(__file__).with_name("columnar_child.py")
ColumnarFormat = Literal["parquet", "arrow"]
_SILENCE_S = 600.0  # a batch of rows takes milliseconds, so a child that is silent longer is in an endless loop
_MAX_READ_BYTES = 1 << 20
_MAX_EXTRA_BYTES = 64 << 20  # of short texts and metadata in a message that also holds one text of the maximum length
_CORRUPT: dict[ColumnarFormat, Reason] = {"parquet": Reason.CORRUPT_PARQUET, "arrow": Reason.CORRUPT_ARROW}
_FAILURES = {-1: (Reason.TEXT_NOT_A_STRING, "null"), -2: (Reason.FIELD_TOO_LARGE, "longer than limits.max_line_bytes")}


def read_rows_of_columns(
    file: Readable,
    num_bytes: int,
    file_format: ColumnarFormat,
    origin: Origin,
    records: RecordSettings,
    limits: LimitSettings,
    budget: Budget,
) -> Iterator[Document | Rejection]:
    """Yield the documents of an open Parquet or Arrow file of `num_bytes`.

    Raises:
        StreamError: the file is damaged, or exceeds `budget` or the child's memory limit. The documents before it are valid.
    """
    request = {
        "format": file_format,
        "bytes": num_bytes,
        "text_field": records.text_field,
        "metadata": list(records.metadata),
        "max_text_bytes": limits.max_line_bytes,
        "memory_bytes": limits.reader_memory_bytes,
    }
    corrupt = _CORRUPT[file_format]
    row = 0
    with closing(ConfinedProgram(_CHILD, _SILENCE_S)) as child:
        child.write(json.dumps(request).encode() + b"\n")
        for letter, body in _messages(child, limits.max_line_bytes + _MAX_EXTRA_BYTES, corrupt):
            if letter == b"R":
                data = _piece(file, body, num_bytes, corrupt)
                child.write(struct.pack("<q", len(data)) + data)
            elif letter == b"B":
                for text, metadata in _rows(body):
                    row += 1
                    budget.charge(max(len(text) if isinstance(text, bytes) else 0, 1))
                    yield _document(text, metadata, origin, row, corrupt)
            elif letter == b"E":
                reason, _, detail = body.decode("utf-8", "backslashreplace").partition("\0")
                raise StreamError(Reason(reason), detail)


def _document(text: bytes | int, metadata: str, origin: Origin, row: int, corrupt: Reason) -> Document | Rejection:
    if isinstance(text, int):
        reason, detail = _FAILURES.get(text, (corrupt, "no text"))
        return Rejection(reason, origin.path, row, detail)
    try:
        return origin.document(text.decode("utf-8"), row, 0, metadata)
    except UnicodeDecodeError as error:
        detail, first = explain_bytes(text, error), max(error.start - 40, 0)
        return Rejection.of_bytes(Reason.INVALID_UTF8, origin.path, row, text, detail, first=first)


def _piece(file: Readable, body: bytes, num_bytes: int, corrupt: Reason) -> bytes:
    """Return the bytes that the child requests."""
    offset, size = struct.unpack("<qq", body)
    if not (0 <= offset <= num_bytes and 0 <= size <= _MAX_READ_BYTES):
        raise StreamError(corrupt, f"its reader requested {size} bytes at offset {offset}, of {num_bytes}")
    file.seek(offset)
    return file.read(size)


def _rows(body: bytes) -> Iterator[tuple[bytes | int, str]]:
    """Yield text and metadata of each row in a message. A negative number, a key of `_FAILURES`, replaces a missing text."""
    [num_rows] = struct.unpack_from("<q", body)
    lengths = array("q", body[8 : 8 + 16 * num_rows])
    text_lengths, metadata_lengths = lengths[:num_rows], lengths[num_rows:]
    position = 8 + 16 * num_rows
    metadata_position = position + sum(max(length, 0) for length in text_lengths)
    for text_length, metadata_length in zip(text_lengths, metadata_lengths, strict=True):
        text = body[position : position + text_length] if text_length >= 0 else text_length
        metadata = body[metadata_position : metadata_position + metadata_length]
        yield text, metadata.decode("utf-8", "backslashreplace")
        position += max(text_length, 0)
        metadata_position += metadata_length


def _messages(child: ConfinedProgram, max_bytes: int, corrupt: Reason) -> Iterator[tuple[bytes, bytes]]:
    """Yield the child's messages, each as a letter and a body of at most `max_bytes`, up to and including the last one.

    Raises:
        StreamError: the child ended, was silent too long, or sent a message of a size that the protocol does not allow.
    """
    letter = b""
    try:
        while letter not in (b"E", b"Z"):
            letter, length = struct.unpack("<cq", child.read(9))
            if not 0 <= length <= max_bytes:
                raise StreamError(corrupt, f"its reader sent a message of {length} bytes")
            yield letter, child.read(length)
    except ProgramEndedError as error:
        raise StreamError(corrupt, f"its reader {error}") from None
