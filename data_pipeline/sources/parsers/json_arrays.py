"""Read a JSON array of records: each object in it is one document. The file is read as a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.json_lines import parse_json_line
from data_pipeline.sources.parsers.source_format import BOM, Content, SourceFormat
from data_pipeline.sources.streams import Line, StreamError

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?+)|[\[{]|[\]}]', re.DOTALL)
_BEGIN = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*")
_BETWEEN = b", \t\r\n"
_PEEKED = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[[ \t\r\n]*\{")


def is_array(first: bytes) -> bool:
    """Return whether a file that begins with these bytes is an array of objects."""
    return _PEEKED.match(first) is not None


def _read(content: Content) -> Iterator[Document | Rejection]:
    limits = content.config.limits
    for line in _elements(content.blocks, limits.max_line_bytes):
        yield parse_json_line(line, content.origin, content.config.records, limits)


JSON_ARRAY = SourceFormat("json", {}, _read, markup="records")
"""Its files are called `.json`, as others are, so their beginning decides."""


def _elements(blocks: Iterator[bytes], max_bytes: int) -> Iterator[Line]:
    """Yield the elements with their numbers in place of line numbers. One that is too long ends the file."""
    buffer = next(blocks, b"").removeprefix(BOM)
    begin = _BEGIN.match(buffer)
    if begin is None:
        raise StreamError(Reason.NOT_JSON, "it is no JSON array")
    number, start, position, depth = 0, begin.end(), begin.end(), 0
    while True:
        token = _TOKEN.search(buffer, position)
        if token is None or token[1] == b"":  # a text that may end in the next block
            position = len(buffer) if token is None else token.start()
            more = next(blocks, b"")
            if not more:
                raise StreamError(Reason.NOT_JSON, "the array ends in the middle; the file is truncated")
            if position - start > max_bytes or len(buffer) - start > 2 * max_bytes:
                raise StreamError(Reason.LINE_TOO_LONG, f"element {number + 1} is longer than limits.max_line_bytes")
            buffer, start, position = buffer[start:] + more, 0, position - start
            continue
        position = token.end()
        if token[1] is not None:
            continue
        is_opening = token[0] in b"[{"
        if not depth:  # what is no object stands between the elements, such as null
            if between := buffer[start : token.start()].strip(_BETWEEN):
                number += 1
                yield Line(number, number, between, too_long=len(between) > max_bytes)
            start = token.start()
        depth += 1 if is_opening else -1
        if depth < 0:
            _check_end(token[0] == b"]", chain((buffer[position:],), blocks), number)
            return
        if not depth:
            number += 1
            yield Line(number, 0 if number == 1 else number, buffer[start:position], too_long=position - start > max_bytes)
            start = position


def _check_end(is_closed: bool, rest: Iterator[bytes], number: int) -> None:
    if not is_closed or any(block.strip() for block in rest):
        raise StreamError(Reason.NOT_JSON, f"the array ends behind element {number}, but the file does not")
