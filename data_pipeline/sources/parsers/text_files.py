"""Read plain text: a document is a whole file, a paragraph, or a chunk of lines."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import SourceError
from data_pipeline.config import LimitConfig, TextConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.builtin import parse_topics
from data_pipeline.sources.parsers.decoding import Origin, decode
from data_pipeline.sources.streams import Line, join_blocks, read_lines

__all__ = ["read_pieces", "read_topics", "read_whole"]


def read_whole(blocks: Iterator[bytes], origin: Origin, limits: LimitConfig) -> Iterator[Document | Rejection]:
    data, is_whole = join_blocks(blocks, limits.max_document_bytes)
    if is_whole:
        yield decode(data, origin, 1, 0)
        return
    detail = f"more than limits.max_document_bytes = {limits.max_document_bytes}"
    remedy = "" if origin.markup == "html" else "; set text.documents to chunks or paragraphs"
    yield Rejection.of_bytes(Reason.FILE_TOO_LARGE, origin.path, 1, data, detail + remedy)


def read_pieces(
    blocks: Iterator[bytes], origin: Origin, text: TextConfig, limits: LimitConfig, border: int = 0
) -> Iterator[Document | Rejection]:
    """Yield paragraphs, or chunks of whole lines. None crosses byte `border`, at which a split by position cuts the file."""
    by_paragraph = text.documents == "paragraphs"
    max_bytes = limits.max_document_bytes if by_paragraph else None
    first: Line | None = None
    piece = bytearray()  # each line with its newline
    characters = 0
    for line in read_lines(blocks, limits.max_line_bytes):
        if line.too_long:
            yield Rejection.of_bytes(Reason.LINE_TOO_LONG, origin.path, line.number, line.data, "longer than limits.max_line_bytes")
            continue
        is_blank = by_paragraph and not line.data.strip()
        ends = is_blank if by_paragraph else characters >= text.chunk_chars
        if first and (ends or first.offset < border <= line.offset):
            yield _document(first, piece, origin, max_bytes)
            first, piece, characters = None, bytearray(), 0
        if is_blank:
            continue
        first = first or line
        if max_bytes is None or len(piece) <= max_bytes:  # the rest of a too large paragraph is not kept in memory
            piece += line.data + b"\n"
        characters += len(line.data.decode("utf-8", "ignore")) + 1
    if first:
        yield _document(first, piece, origin, max_bytes)


def read_topics(blocks: Iterator[bytes], origin: Origin) -> Iterator[Document | Rejection]:
    try:
        topics = parse_topics(b"".join(blocks).decode("utf-8"))
    except (ValueError, SyntaxError) as error:
        raise SourceError(
            f"the built-in corpus: {origin.path} of this Python cannot be used: {error}; set --sources to other files"
        ) from None
    for line, text in topics:
        yield origin.document(text, line, 0)


def _document(first: Line, lines: bytearray, origin: Origin, max_bytes: int | None) -> Document | Rejection:
    if max_bytes is not None and len(lines) - 1 > max_bytes:
        detail = f"a paragraph of more than limits.max_document_bytes = {max_bytes}; set text.documents to chunks"
        return Rejection.of_bytes(Reason.FILE_TOO_LARGE, origin.path, first.number, first.data, detail)
    return decode(bytes(lines[:-1]), origin, first.number, first.offset)
