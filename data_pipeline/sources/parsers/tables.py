"""Read CSV and TSV: the first row names the columns, and each later row is one document.

Rows follow RFC 4180: a field in double quotes may contain the separator, line ends, and doubled quotes. A row that violates these
rules, or has another number of fields than the first row, is rejected. If a quote is never closed, its line is rejected and reading
continues at the next line. So an extra quote costs one line, not the rest of the file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from data_pipeline.config import LimitConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.decoding import BOM, MalformedError, Origin, chat_fields, has_surrogate, metadata_json, with_end
from data_pipeline.sources.streams import Line, read_lines

__all__ = ["read_rows", "read_table"]


def read_table(
    blocks: Iterator[bytes], origin: Origin, separator: str, records: RecordConfig, limits: LimitConfig
) -> Iterator[Document | Rejection]:
    # This limit applies to the whole process. It never rejects a row, because rows are cut to this length before they are parsed.
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
            columns = columns or _Columns((), records)  # a later row must not be read as the first row


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
    """Return a pattern that matches one row with its newline. It never backtracks, so it reads each byte once."""
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


@dataclass(frozen=True)
class _Columns:
    names: tuple[str, ...]
    records: RecordConfig

    def document(self, row: list[str], origin: Origin, line: Line) -> Document:
        if not row:
            raise MalformedError(Reason.EMPTY, "an empty line")
        is_chat = origin.markup == "chat"
        names = chat_fields(self.records) if is_chat else {"text_field": self.records.text_field}
        if self.records.prompt_field is not None and not is_chat:
            names["prompt_field"] = self.records.prompt_field
        for setting, name in names.items():
            self._check_named_once("messages_field" if is_chat else setting, name)
        if len(row) != len(self.names):
            raise MalformedError(Reason.FIELD_COUNT, f"{len(row)} fields, but the first row names {len(self.names)} columns")
        fields = dict(zip(self.names, row, strict=True))
        for name in names.values():
            if has_surrogate(fields[name]):
                raise MalformedError(Reason.INVALID_UTF8, f"column {name!r} is not UTF-8; convert the file to UTF-8")
        if is_chat:
            texts = {name: fields[column] for name, column in names.items()}
            return origin.chat(texts, line.number, line.offset, metadata_json(fields, self.records.metadata))
        prompt = with_end(fields[names["prompt_field"]], self.records) if "prompt_field" in names else ""
        text, metadata = fields[self.records.text_field], metadata_json(fields, self.records.kept_fields)
        return origin.document(text, line.number, line.offset, metadata, prompt)

    def _check_named_once(self, setting: str, name: str) -> None:
        if name not in self.names:
            shown = ", ".join(map(repr, self.names[:8]))
            raise MalformedError(Reason.NO_TEXT_FIELD, f"no column {name!r}; the first row names {shown}; see records.{setting}")
        if self.names.count(name) > 1:
            raise MalformedError(Reason.DUPLICATE_KEY, f"the first row names column {name!r} twice")
