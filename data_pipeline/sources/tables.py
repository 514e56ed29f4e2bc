"""CSV and TSV to documents: the first row names the columns, and each row after it is one document.

Rows are read as RFC 4180 has them: a field in double quotes may hold the separator, line ends, and quotes that are doubled. A row
that is not so, or has another number of fields than the first, is rejected. Where a quote is never closed, its line is rejected and
reading goes on at the next one, so that a quote too many costs a line and not the rest of the file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from data_pipeline.config import LimitSettings, RecordSettings
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.decoding import BOM, MalformedError, Origin, has_surrogate, metadata_json
from data_pipeline.sources.streams import Line, read_lines

__all__ = ["read_rows", "read_table"]


def read_table(
    blocks: Iterator[bytes], origin: Origin, separator: str, records: RecordSettings, limits: LimitSettings
) -> Iterator[Document | Rejection]:
    """The documents of a table whose fields are separated by `separator`."""
    # This limit is one of the whole process and only ever set to what rows are bounded by before the parser sees them.
    csv.field_size_limit(limits.max_line_bytes)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if records.quotes else csv.QUOTE_NONE
    lines = read_rows(blocks, separator, limits.max_line_bytes) if records.quotes else read_lines(blocks, limits.max_line_bytes)
    columns: _Columns | None = None
    for line in lines:
        try:
            row = _parse_row(line, separator, quoting)
            if columns is None:
                columns = _Columns(tuple(row), records)
            else:
                yield columns.document(row, origin, line)
        except MalformedError as error:
            yield Rejection.of_bytes(error.reason, origin.path, line.number, line.data, str(error))
            columns = columns or _Columns((), records)  # no later row may pass for the first


def read_rows(blocks: Iterator[bytes], separator: str, max_bytes: int) -> Iterator[Line]:
    """The rows of a table, each with all of its lines. One longer than `max_bytes` is cut and marked.

    Where a quote is not closed within `max_bytes`, its line comes alone.
    """
    pattern = _row_pattern(separator)
    buffer, has_ended = _extend(b"", blocks, len(BOM))
    position = len(BOM) if buffer.startswith(BOM) else 0
    offset, number = 0, 1  # of the buffer in the file, and of the next line
    while True:
        if match := pattern.match(buffer, position):
            end = match.end() - 1
        elif len(buffer) - position <= max_bytes and not has_ended:
            buffer, offset, position = buffer[position:], offset + position, 0
            # As much again as there is, so that a long row is not looked at once for each block.
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
    """Matches one row with its newline. What it takes it never gives back, so it looks at each byte once."""
    quoted, plain = rb'"[^"]*+(?:""[^"]*+)*+"[^S\n]*+', rb'[^"S\n][^S\n]*+'
    row = rb"(?:%b|%b|)(?:S(?:%b|%b|))*+\n" % (quoted, plain, quoted, plain)
    return re.compile(row.replace(b"S", separator.encode()))


def _extend(buffer: bytes, blocks: Iterator[bytes], wanted: int) -> tuple[bytes, bool]:
    """The buffer with at least `wanted` bytes more, and whether the file has ended; its last row gets the newline it may lack."""
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
    """Passes over the rest of a line: how many bytes that were, and what comes after it."""
    passed = 0
    for block in blocks:
        if (newline := block.find(b"\n")) >= 0:
            return passed + newline + 1, block[newline + 1 :]
        passed += len(block)
    return passed, b""


def _parse_row(line: Line, separator: str, quoting: Literal[0, 3]) -> list[str]:
    """The fields of a row. Bytes that are no UTF-8 become lone surrogates, so that only a text that holds them is lost.

    Raises:
        MalformedError: there are none.
    """
    if line.too_long:
        raise MalformedError(Reason.LINE_TOO_LONG, "a row longer than limits.max_line_bytes")
    data = line.data.removeprefix(BOM) if line.offset == 0 else line.data
    text = data.decode("utf-8", "surrogateescape")
    try:
        return next(csv.reader((text,), delimiter=separator, strict=True, quoting=quoting))
    except csv.Error as error:
        remedy = "; a quote is not closed within limits.max_line_bytes" if "end of data" in str(error) else ""
        raise MalformedError(Reason.NOT_CSV, f"{error}{remedy}; see records.quotes") from None


@dataclass(frozen=True)
class _Columns:
    """The first row, and which of its columns holds the text."""

    names: tuple[str, ...]
    records: RecordSettings

    def document(self, row: list[str], origin: Origin, line: Line) -> Document:
        """The document of a row.

        Raises:
            MalformedError: it has none.
        """
        if not row:
            raise MalformedError(Reason.EMPTY, "an empty line")
        name = self.records.text_field
        if name not in self.names:
            shown = ", ".join(map(repr, self.names[:8]))
            raise MalformedError(Reason.NO_TEXT_FIELD, f"no column {name!r}; the first row has {shown}; see records.text_field")
        if self.names.count(name) > 1:
            raise MalformedError(Reason.DUPLICATE_KEY, f"the first row names column {name!r} twice")
        if len(row) != len(self.names):
            raise MalformedError(Reason.FIELD_COUNT, f"{len(row)} fields, but the first row names {len(self.names)} columns")
        fields = dict(zip(self.names, row, strict=True))
        if has_surrogate(fields[name]):
            raise MalformedError(Reason.INVALID_UTF8, f"column {name!r} is no UTF-8; convert the file to UTF-8")
        return origin.document(fields[name], line.number, line.offset, metadata_json(fields, self.records.metadata))
