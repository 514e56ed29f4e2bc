"""Turns the bytes of an input file into documents, and whatever is broken into counted rejections; nothing a file holds raises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from data_pipeline.config import PrepareConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.errors import SourceError
from data_pipeline.sources.builtin import parse_topics
from data_pipeline.sources.inputs import Part
from data_pipeline.sources.streams import Line, StreamError, read_blocks, read_lines
from data_pipeline.split import tail_offset

__all__ = ["parse_json_line", "read_part"]

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_part(part: Part, config: PrepareConfig) -> Iterator[Document | Rejection]:
    """The documents that begin in a part of a file, in order, and a rejection in the place of each one that is broken.

    Raises:
        SourceError: the file is not the one that was found when the preparation began.
    """
    file = part.file
    try:
        status = file.location.stat()
        if (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
            raise SourceError(f"{file.location} changed while it was being prepared; run the same command again")
        with file.location.open("rb") as stream:
            stream.seek(max(part.start - 1, 0))
            blocks = read_blocks(stream, file.compression, config.limits)
            if file.format == "jsonl":
                yield from _read_jsonl(blocks, part, config)
            elif file.format == "topics":
                yield from _read_topics(blocks, file.path)
            elif config.text.documents == "file":
                yield from _read_whole(blocks, file.path, config.limits.max_document_bytes)
            else:
                yield from _read_pieces(blocks, part, config)
    except StreamError as error:
        yield Rejection(error.reason, file.path, 0, error.detail)
    except FileNotFoundError:
        raise SourceError(f"{file.location} disappeared while it was being prepared; run the same command again") from None


def parse_json_line(line: Line, path: str, text_field: str) -> Document | Rejection:
    """The document in one line of JSON, or why there is none.

    Stricter than Python: NaN and infinity are no JSON, and an object that names a field twice does not say which one it means.
    """
    data = line.data.removeprefix(_BOM) if line.offset == 0 else line.data
    try:
        if line.too_long:
            raise _MalformedError(Reason.LINE_TOO_LONG, "longer than limits.max_line_bytes")
        if not data.strip():
            raise _MalformedError(Reason.EMPTY, "an empty line")
        return Document(_text_field(_parse_json(data), text_field), path, line.number, line.offset)
    except _MalformedError as error:
        return Rejection.of_bytes(error.reason, path, line.number, data, str(error))


class _MalformedError(ValueError):
    """A line holds no document."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _MalformedError(Reason.INVALID_UTF8, _explain_bytes(data, error)) from None
    except RecursionError:
        raise _MalformedError(Reason.TOO_DEEP, "nested too deeply") from None
    except _MalformedError:
        raise
    except ValueError as error:  # JSONDecodeError, and integers of more digits than Python converts
        raise _MalformedError(Reason.NOT_JSON, str(error)) from None


def _text_field(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise _MalformedError(Reason.NOT_AN_OBJECT, f"a JSON {type(value).__name__} where an object is needed")
    if name not in value:
        fields = ", ".join(map(repr, list(value)[:8])) or "none at all"
        raise _MalformedError(Reason.NO_TEXT_FIELD, f"no field {name!r}; there are {fields}; see jsonl.text_field")
    text = value[name]
    if not isinstance(text, str):
        raise _MalformedError(Reason.TEXT_NOT_A_STRING, f"field {name!r} is a {type(text).__name__}")
    if not text.isascii() and _SURROGATE.search(text):
        raise _MalformedError(Reason.LONE_SURROGATE, f"field {name!r} holds half of a surrogate pair")
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _MalformedError(Reason.DUPLICATE_KEY, f"field {twice!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _read_jsonl(blocks: Iterator[bytes], part: Part, config: PrepareConfig) -> Iterator[Document | Rejection]:
    end = part.end if part.file.compression == "none" else None
    for line in read_lines(blocks, config.limits.max_line_bytes, part.start, end):
        yield parse_json_line(line, part.file.path, config.jsonl.text_field)


def _read_whole(blocks: Iterator[bytes], path: str, max_bytes: int) -> Iterator[Document | Rejection]:
    data = bytearray()
    for block in blocks:
        data += block
        if len(data) > max_bytes:
            detail = f"more than limits.max_document_bytes = {max_bytes}; set text.documents to chunks or paragraphs"
            yield Rejection(Reason.FILE_TOO_LARGE, path, 1, detail)
            return
    yield _decode(bytes(data.removeprefix(_BOM)), path, 1, 0)


def _read_topics(blocks: Iterator[bytes], path: str) -> Iterator[Document | Rejection]:
    code = b"".join(blocks)
    try:
        topics = parse_topics(code.decode("utf-8"))
    except (ValueError, SyntaxError) as error:
        raise SourceError(
            f"the built-in corpus: {path} of this Python cannot be used: {error}; name --sources of your own"
        ) from None
    for line, text in topics:
        yield Document(text, path, line, 0)


def _read_pieces(blocks: Iterator[bytes], part: Part, config: PrepareConfig) -> Iterator[Document | Rejection]:
    """Paragraphs, or chunks of whole lines; a chunk never reaches across the border of a split by position."""
    path = part.file.path
    border = tail_offset(part.file.bytes, config.split.val_fraction) if config.split.by == "tail" else 0
    by_paragraph = config.text.documents == "paragraphs"
    piece: list[Line] = []
    characters = 0
    for line in read_lines(blocks, config.limits.max_line_bytes):
        if line.too_long:
            yield Rejection.of_bytes(Reason.LINE_TOO_LONG, path, line.number, line.data, "longer than limits.max_line_bytes")
            continue
        ends = not line.data.strip() if by_paragraph else characters >= config.text.chunk_chars
        if piece and (ends or piece[0].offset < border <= line.offset):
            yield _join(piece, path)
            piece, characters = [], 0
        if by_paragraph and not line.data.strip():
            continue
        piece.append(line)
        characters += len(line.data.decode("utf-8", "ignore")) + 1
    if piece:
        yield _join(piece, path)


def _join(lines: list[Line], path: str) -> Document | Rejection:
    data = b"\n".join(line.data for line in lines)
    return _decode(data.removeprefix(_BOM) if lines[0].offset == 0 else data, path, lines[0].number, lines[0].offset)


def _decode(data: bytes, path: str, line: int, offset: int) -> Document | Rejection:
    try:
        return Document(data.decode("utf-8"), path, line, offset)
    except UnicodeDecodeError as error:
        bad_line = line + data.count(b"\n", 0, error.start)
        return Rejection.of_bytes(
            Reason.INVALID_UTF8, path, bad_line, data[max(error.start - 40, 0) :], _explain_bytes(data, error)
        )


def _explain_bytes(data: bytes, error: UnicodeDecodeError) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "this is UTF-16; convert it to UTF-8"
    return f"byte 0x{data[error.start]:02x} is no UTF-8 ({error.reason}); convert the file to UTF-8"
