"""Turn the bytes of an input file into documents, and malformed input into rejections. No content of a file raises an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from data_pipeline.config import Kind, PrepareConfig
from data_pipeline.dataset.splits import tail_offset
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.archives import ArchiveError, Member, read_tar, read_zip
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.inputs import Part
from data_pipeline.sources.listing import UnreadableSourceError
from data_pipeline.sources.parsers.source_format import Content
from data_pipeline.sources.storage import check_unchanged, open_file
from data_pipeline.sources.streams import Budget, Readable, StreamError, as_utf8, decompress, marked_encoding, raw_blocks

_MARK_BYTES = 4


def read_part(part: Part, config: PrepareConfig, ignored: Counter[str] | None = None) -> Iterator[Document | Rejection]:
    """Yield documents in order, a rejection for each malformed one. `ignored` counts unknown formats in archives, by extension."""
    file = part.file
    try:
        check_unchanged(file.location, file.bytes, file.stamp, config.limits)
        with open_file(file.location, file.bytes, config.limits) as stream:
            try:
                yield from _read_file(stream, part, config, Counter() if ignored is None else ignored)
            except StreamError as error:
                yield Rejection(error.reason, file.path, 0, error.detail, fields=error.fields)
        check_unchanged(file.location, file.bytes, file.stamp, config.limits)
    except FileNotFoundError:
        raise UnreadableSourceError(
            f"{file.location} disappeared while it was being prepared; run the same command again"
        ) from None


def _read_file(stream: Readable, part: Part, config: PrepareConfig, ignored: Counter[str]) -> Iterator[Document | Rejection]:
    file, limits = part.file, config.limits
    if file.format == "zip":
        members = read_zip(stream, file.bytes, file.path, limits, ignored)
        yield from _read_members(members, file.kind, config, Budget(limits, lambda: file.bytes))
        return
    is_compressed = file.compression != "none"
    end = part.end if part.end < file.bytes else None
    if (part.start or end is not None) and marked_encoding(stream.read(_MARK_BYTES)) is not None:
        if part.start:
            return
        end = None  # only the beginning tells the encoding, so the first part is the whole file
    stream.seek(max(part.start - 1, 0))
    blocks = raw_blocks(stream)
    if not part.start and end is None and not is_compressed:
        blocks = as_utf8(blocks)
    if is_compressed:
        blocks = as_utf8(decompress(blocks, file.compression, limits, Budget(limits, stream.tell)))
    budget = Budget(limits, stream.tell)
    if file.format == "tar":
        yield from _read_members(read_tar(blocks, file.path, limits, ignored), file.kind, config, budget)
        return
    source_format = FORMATS[file.format]
    origin = source_format.origin(file.path, file.kind, config)
    border = tail_offset(file.bytes, config.split.val_fraction) if config.split.by == "tail" else 0
    for_random_access = None if is_compressed else stream
    yield from source_format.read(Content(origin, config, blocks, budget, for_random_access, file.bytes, part.start, end, border))


def _read_members(
    members: Iterator[Member | Rejection], kind: Kind | None, config: PrepareConfig, budget: Budget
) -> Iterator[Document | Rejection]:
    for member in members:
        if isinstance(member, Rejection):
            yield member
            continue
        source_format, blocks = FORMATS[member.shape.format], member.blocks
        origin = source_format.origin(member.path, kind or member.shape.kind, config)
        if member.shape.compression != "none":
            blocks = decompress(blocks, member.shape.compression, config.limits, budget)
        blocks = as_utf8(blocks)
        try:
            yield from source_format.read(Content(origin, config, blocks, budget))
        except StreamError as error:
            if isinstance(error, ArchiveError) or error.reason == Reason.DECOMPRESSION_BUDGET:
                raise
            yield Rejection(error.reason, member.path, 0, error.detail, fields=error.fields)
