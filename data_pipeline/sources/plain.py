"""Plain text to documents: a whole file, its paragraphs, or chunks of its lines."""

from __future__ import annotations

from collections.abc import Iterator

from data_pipeline.config import LimitSettings, TextSettings
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.errors import SourceError
from data_pipeline.sources.builtin import parse_topics
from data_pipeline.sources.decoding import Origin, decode
from data_pipeline.sources.streams import Line, read_lines

__all__ = ["read_pieces", "read_topics", "read_whole"]


def read_whole(blocks: Iterator[bytes], origin: Origin, limits: LimitSettings) -> Iterator[Document | Rejection]:
    """One document."""
    pieces: list[bytes] = []
    num_bytes = 0
    for block in blocks:
        num_bytes += len(block)
        if num_bytes > limits.max_document_bytes:
            detail = f"more than limits.max_document_bytes = {limits.max_document_bytes}"
            remedy = "" if origin.markup == "html" else "; set text.documents to chunks or paragraphs"
            yield Rejection.of_bytes(Reason.FILE_TOO_LARGE, origin.path, 1, (pieces or [block])[0], detail + remedy)
            return
        pieces.append(block)
    data = b"".join(pieces)
    pieces.clear()
    yield decode(data, origin, 1, 0)


def read_pieces(
    blocks: Iterator[bytes], origin: Origin, text: TextSettings, limits: LimitSettings, border: int = 0
) -> Iterator[Document | Rejection]:
    """Paragraphs, or chunks of whole lines; none reaches across byte `border`, where a split by position cuts the file."""
    by_paragraph = text.documents == "paragraphs"
    piece: list[Line] = []
    characters = 0
    for line in read_lines(blocks, limits.max_line_bytes):
        if line.too_long:
            yield Rejection.of_bytes(Reason.LINE_TOO_LONG, origin.path, line.number, line.data, "longer than limits.max_line_bytes")
            continue
        ends = not line.data.strip() if by_paragraph else characters >= text.chunk_chars
        if piece and (ends or piece[0].offset < border <= line.offset):
            yield _join(piece, origin)
            piece, characters = [], 0
        if by_paragraph and not line.data.strip():
            continue
        piece.append(line)
        characters += len(line.data.decode("utf-8", "ignore")) + 1
    if piece:
        yield _join(piece, origin)


def read_topics(blocks: Iterator[bytes], origin: Origin) -> Iterator[Document | Rejection]:
    """The topics of the language reference, from the file that `help()` reads.

    Raises:
        SourceError: this Python has none.
    """
    try:
        topics = parse_topics(b"".join(blocks).decode("utf-8"))
    except (ValueError, SyntaxError) as error:
        raise SourceError(
            f"the built-in corpus: {origin.path} of this Python cannot be used: {error}; name --sources of your own"
        ) from None
    for line, text in topics:
        yield origin.document(text, line, 0)


def _join(lines: list[Line], origin: Origin) -> Document | Rejection:
    return decode(b"\n".join(line.data for line in lines), origin, lines[0].number, lines[0].offset)
