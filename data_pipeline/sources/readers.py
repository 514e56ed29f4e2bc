"""Turn the bytes of an input file into documents, and malformed input into rejections. No content of a file raises an error.

The formats are read in `parsers` and `archives`.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from typing import Literal, assert_never

from data_pipeline.config import Kind, PrepareConfig
from data_pipeline.dataset.splits import tail_offset
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.archives import ArchiveError, Member, read_tar, read_zip
from data_pipeline.sources.formats import Format
from data_pipeline.sources.inputs import Part
from data_pipeline.sources.parsers.columnar import read_rows_of_columns
from data_pipeline.sources.parsers.decoding import Origin, is_chat
from data_pipeline.sources.parsers.json_lines import parse_json_line
from data_pipeline.sources.parsers.tables import read_table
from data_pipeline.sources.parsers.text_files import read_pieces, read_topics, read_whole
from data_pipeline.sources.storage import UnreadableSourceError, check_unchanged, open_file
from data_pipeline.sources.streams import Budget, Readable, StreamError, decompress, join_blocks, raw_blocks, read_lines

__all__ = ["read_part"]


def read_part(part: Part, config: PrepareConfig, ignored: Counter[str] | None = None) -> Iterator[Document | Rejection]:
    """Yield the documents that begin in a part of a file, in order, with a rejection in the place of each malformed one.

    `config` is that of the file's source. `ignored` counts the files of an unknown format in archives, by extension.
    """
    file = part.file
    check_unchanged(file.location, file.bytes, file.stamp, config.limits)
    try:
        with open_file(file.location, file.bytes, config.limits) as stream:
            yield from _read_file(stream, part, config, Counter() if ignored is None else ignored)
    except StreamError as error:
        yield Rejection(error.reason, file.path, 0, error.detail)
    except FileNotFoundError:
        raise UnreadableSourceError(
            f"{file.location} disappeared while it was being prepared; run the same command again"
        ) from None
    check_unchanged(file.location, file.bytes, file.stamp, config.limits)


def _read_file(stream: Readable, part: Part, config: PrepareConfig, ignored: Counter[str]) -> Iterator[Document | Rejection]:
    file, limits = part.file, config.limits
    origin = _origin(file.path, file.format, file.kind, config)
    if file.format == "zip":
        members = read_zip(stream, file.bytes, file.path, limits, ignored)
        yield from _read_members(members, file.kind, config, Budget(limits, lambda: file.bytes))
        return
    if file.format in ("parquet", "arrow") and file.compression == "none":
        budget = Budget(limits, lambda: file.bytes)
        yield from read_rows_of_columns(stream, file.bytes, file.format, origin, config.records, limits, budget)
        return
    stream.seek(max(part.start - 1, 0))
    blocks = raw_blocks(stream)
    if file.compression != "none":
        blocks = decompress(blocks, file.compression, limits, Budget(limits, stream.tell))
    inner = Budget(limits, stream.tell)
    if file.format == "tar":
        yield from _read_members(read_tar(blocks, file.path, limits, ignored), file.kind, config, inner)
        return
    end = part.end if file.compression == "none" else None
    border = tail_offset(file.bytes, config.split.val_fraction) if config.split.by == "tail" else 0
    yield from _read_blocks(blocks, file.format, origin, config, inner, part.start, end, border)


def _read_members(
    members: Iterator[Member | Rejection], kind: Kind | None, config: PrepareConfig, budget: Budget
) -> Iterator[Document | Rejection]:
    for member in members:
        if isinstance(member, Rejection):
            yield member
            continue
        shape, blocks = member.shape, member.blocks
        origin = _origin(member.path, shape.format, kind or shape.kind, config)
        if shape.compression != "none":
            blocks = decompress(blocks, shape.compression, config.limits, budget)
        try:
            yield from _read_blocks(blocks, shape.format, origin, config, budget)
        except StreamError as error:
            if isinstance(error, ArchiveError) or error.reason == Reason.DECOMPRESSION_BUDGET:
                raise
            yield Rejection(error.reason, member.path, 0, error.detail)


def _read_blocks(
    blocks: Iterator[bytes],
    file_format: Format,
    origin: Origin,
    config: PrepareConfig,
    inner: Budget,
    start: int = 0,
    end: int | None = None,
    border: int = 0,
) -> Iterator[Document | Rejection]:
    """Yield the documents in the decompressed bytes of a file. Only those of JSON Lines that begin in [start, end) are read.

    `inner` is the budget for data that a format decompresses itself. `border` is the byte offset of a split by position.
    """
    limits = config.limits
    match file_format:
        case "jsonl":
            for line in read_lines(blocks, limits.max_line_bytes, start, end):
                yield parse_json_line(line, origin, config.records, limits)
        case "csv" | "tsv":
            yield from read_table(blocks, origin, "," if file_format == "csv" else "\t", config.records, limits)
        case "parquet" | "arrow":
            data, is_whole = join_blocks(blocks, limits.max_document_bytes)  # the index is at the end, so all bytes are needed
            if not is_whole:
                detail = f"a compressed or archived .{file_format} file over limits.max_document_bytes; unpack it first"
                raise StreamError(Reason.FILE_TOO_LARGE, detail)
            yield from read_rows_of_columns(io.BytesIO(data), len(data), file_format, origin, config.records, limits, inner)
        case "topics":
            yield from read_topics(blocks, origin)
        case "text" if config.text.documents != "file":
            yield from read_pieces(blocks, origin, config.text, limits, border)
        case "text" | "html":
            yield from read_whole(blocks, origin, limits)
        case "tar" | "zip":
            raise AssertionError("archives are read by _read_file, and nested archives are rejected")
        case _:
            assert_never(file_format)


def _origin(path: str, file_format: Format, kind: Kind | None, config: PrepareConfig) -> Origin:
    """Return the origin of a file's documents. HTML is of kind web, unless the source sets another kind."""
    markup: Literal["plain", "html", "chat"] = "html" if file_format == "html" else "plain"
    if file_format in ("jsonl", "csv", "tsv", "parquet", "arrow"):
        markup = "chat" if is_chat(config.records, config.chat) else config.records.markup
    return Origin(path, kind or ("web" if markup == "html" else "prose"), markup)
