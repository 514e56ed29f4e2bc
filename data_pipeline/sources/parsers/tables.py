"""Read CSV and TSV (RFC 4180): the first row names the columns, and each later row is one document.

A row with another number of fields is rejected. If a quote is never closed, its line is rejected and the next line is read.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import partial
from typing import Literal

from data_pipeline.config import RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.fields import missing_field
from data_pipeline.sources.parsers.source_format import (
    BOM,
    Content,
    MalformedError,
    Origin,
    SourceFormat,
    has_surrogate,
)
from data_pipeline.sources.streams import Line, read_lines


def _read_table(content: Content, separator: str) -> Iterator[Document | Rejection]:
    origin, records, max_bytes = content.origin, content.config.records, content.config.limits.max_line_bytes
    # This limit applies to the whole process. It never rejects a row, because rows are cut to this length before they are parsed.
    csv.field_size_limit(max_bytes)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if records.quotes else csv.QUOTE_NONE
    lines = read_rows(content.blocks, separator, max_bytes) if records.quotes else read_lines(content.blocks, max_bytes)
    columns: list[str] | None = None
    for line in lines:
        try:
            row = _parse_row(line, separator, quoting)
            if columns is None:
                columns = row
            else:
                yield _document(columns, row, origin, records, line)
        except MalformedError as error:
            yield Rejection.of_bytes(error.reason, origin.path, line.number, line.data, str(error), fields=error.fields)
            columns = columns or []  # a later row must not be read as the first row


CSV = SourceFormat("csv", {".csv": None}, partial(_read_table, separator=","), markup="records")
TSV = SourceFormat("tsv", {".tsv": None}, partial(_read_table, separator="\t"), markup="records")


def read_rows(blocks: Iterator[bytes], separator: str, max_bytes: int) -> Iterator[Line]:
    """Yield the rows of a table, each with all its lines; if a quote is not closed within `max_bytes`, its line alone."""
    pattern = _row_pattern(separator)
    buffer, has_ended = _extend(b"", blocks, len(BOM))
    position = len(BOM) if buffer.startswith(BOM) else 0
    offset, number = 0, 1  # offset of the buffer in the file, and number of the next line
    while True:
        if match := pattern.match(buffer, position):
            end = match.end() - 1
        elif len(buffer) - position <= max_bytes and not has_ended:
            buffer, offset, position = buffer[position:], offset + position, 0
            # The buffer doubles, so that a long row is not matched again for each block.
            buffer, has_ended = _extend(buffer, blocks, min(max(len(buffer), 1), max_bytes + 1 - len(buffer)))
            continue
        elif position == len(buffer):
            return
        else:
            end = buffer.find(b"\n", position)
        stop = end if end >= 0 else len(buffer)
        yield Line(number, offset + position, buffer[position : min(stop, position + max_bytes)], stop - position > max_bytes)
        number += 1 + buffer.count(b"\n", position, stop)
        if end >= 0:
            position = end + 1
        else:
            passed, rest = _pass_line(blocks)
            buffer, offset, position = rest, offset + stop + passed, 0


def _row_pattern(separator: str) -> re.Pattern[bytes]:
    """Match one row with its newline. The pattern never backtracks, so it reads each byte once."""
    quoted, plain = rb'"[^"]*+(?:""[^"]*+)*+"[^S\n]*+', rb'[^"S\n][^S\n]*+'
    row = rb"(?:%b|%b|)(?:S(?:%b|%b|))*+\n" % (quoted, plain, quoted, plain)
    return re.compile(row.replace(b"S", separator.encode()))


def _extend(buffer: bytes, blocks: Iterator[bytes], wanted: int) -> tuple[bytes, bool]:
    """Return the buffer with at least `wanted` more bytes, and whether the file has ended. A missing last newline is added."""
    pieces = [buffer]
    while wanted > 0:
        block = next(blocks, b"")
        if not block:
            whole = b"".join(pieces)
            return (whole if not whole or whole.endswith(b"\n") else whole + b"\n"), True
        pieces.append(block)
        wanted -= len(block)
    return b"".join(pieces), False


def _pass_line(blocks: Iterator[bytes]) -> tuple[int, bytes]:
    passed = 0
    for block in blocks:
        if (newline := block.find(b"\n")) >= 0:
            return passed + newline + 1, block[newline + 1 :]
        passed += len(block)
    return passed, b""


def _parse_row(line: Line, separator: str, quoting: Literal[0, 3]) -> list[str]:
    if line.too_long:
        raise MalformedError(Reason.LINE_TOO_LONG, "a row longer than limits.max_line_bytes")
    data = line.data.removeprefix(BOM) if line.offset == 0 else line.data
    text = data.decode("utf-8", "surrogateescape")
    try:
        return next(csv.reader((text,), delimiter=separator, strict=True, quoting=quoting))
    except csv.Error as error:
        remedy = "; a quote is not closed within limits.max_line_bytes" if "end of data" in str(error) else ""
        raise MalformedError(Reason.NOT_CSV, f"{error}{remedy}; see records.quotes") from None


def _document(columns: list[str], row: list[str], origin: Origin, records: RecordConfig, line: Line) -> Document:
    if not row:
        raise MalformedError(Reason.EMPTY, "an empty line")
    needed = origin.needed(records)
    for name, setting in needed.items():
        if name not in columns:
            raise missing_field("column", name, columns, setting)
        if columns.count(name) > 1:
            raise MalformedError(Reason.DUPLICATE_KEY, f"the first row names column {name!r} twice")
    if len(row) != len(columns):
        raise MalformedError(Reason.FIELD_COUNT, f"{len(row)} fields, but the first row names {len(columns)} columns")
    fields = dict(zip(columns, row, strict=True))
    for name in needed:
        if has_surrogate(fields[name]):
            raise MalformedError(Reason.INVALID_UTF8, f"column {name!r} is not UTF-8; convert the file to UTF-8")
    return origin.record(fields, line.number, line.offset, records)
