"""Bytes and lines of an input file, in constant memory and within the budgets for hostile input."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import zstandard

from data_pipeline.config import LimitSettings
from data_pipeline.documents import Reason

__all__ = ["Compression", "Line", "StreamError", "read_blocks", "read_lines"]

Compression = Literal["none", "gz", "zst"]

_BLOCK_BYTES = 1 << 18
_EXPANSION_GRACE_BYTES = 1 << 20  # a few hundred bytes of spaces expand by more than any sensible ratio and harm nobody
_ZSTD_WINDOW_BYTES = 1 << 27  # what `zstd --ultra -22` needs; a frame may ask for gigabytes


class StreamError(Exception):
    """A file's bytes cannot be read on; what came before is good."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its newline."""

    number: int
    """From 1, counted from the first line that was asked for."""
    offset: int
    """Of its first byte in the decompressed file."""
    data: bytes
    """The line, or the beginning of one that is too long."""
    too_long: bool = False


def read_blocks(file: BinaryIO, compression: Compression, limits: LimitSettings) -> Iterator[bytes]:
    """The (decompressed) bytes of an open file from its position on, in blocks of at most 2 MiB.

    Raises:
        StreamError: the compressed data is damaged, or expands past the budgets of `limits`.
    """
    if compression == "none":
        while block := file.read(_BLOCK_BYTES):
            yield block
        return
    decompress = _gunzip if compression == "gz" else _unzstd
    total = 0
    for block in decompress(file):
        total += len(block)
        allowed = min(limits.max_decompressed_bytes, max(file.tell() * limits.max_expansion, _EXPANSION_GRACE_BYTES))
        if total > allowed:
            raise StreamError(
                Reason.DECOMPRESSION_BUDGET,
                f"{file.tell()} compressed bytes became more than {allowed}; "
                "if the file is honest, raise limits.max_expansion or limits.max_decompressed_bytes",
            )
        yield block


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """All members of a gzip file; zero padding after the last one is allowed, as gzip itself allows it."""
    member = zlib.decompressobj(wbits=31)
    started = False
    try:
        while data := file.read(_BLOCK_BYTES):
            while data:
                if member.eof:
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    member = zlib.decompressobj(wbits=31)
                started = True
                block = member.decompress(data, _BLOCK_BYTES)
                data = member.unused_data if member.eof else member.unconsumed_tail
                if block:
                    yield block
    except zlib.error as error:
        raise StreamError(Reason.CORRUPT_COMPRESSION, f"damaged gzip data: {error}") from None
    if not started or not member.eof:
        raise StreamError(Reason.CORRUPT_COMPRESSION, "gzip data ends in the middle; the file was cut short")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a Zstandard file."""
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = context.decompressobj()
    started = False
    try:
        # A small input at a time bounds the output of one call: 4 bytes can stand for 128 KiB, no fewer for more.
        while data := file.read(64):
            while data:
                if frame.eof:
                    frame = context.decompressobj()
                started = True
                block = frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                if block:
                    yield block
    except zstandard.ZstdError as error:
        raise StreamError(Reason.CORRUPT_COMPRESSION, f"damaged zstd data: {error}") from None
    if not started or not frame.eof:
        raise StreamError(Reason.CORRUPT_COMPRESSION, "zstd data ends in the middle; the file was cut short")


def read_lines(blocks: Iterator[bytes], max_bytes: int, start: int = 0, end: int | None = None) -> Iterator[Line]:
    r"""The lines that start at an offset in [start, end); `blocks` must begin at the byte before `start`, if there is one.

    A line is what ends in `\n` or at the end of the file. One longer than `max_bytes` is yielded cut and marked, and its rest is
    passed over without being kept. Reading stops where no further line of the range can start, so that cutting a file into ranges
    costs each byte of a giant line once, not once a range.
    """
    offset = max(start - 1, 0)
    foreign = start > 0  # in the line that reaches into the range from before it
    kept = bytearray()
    length = number = 0
    for block in blocks:
        position = 0
        while (newline := block.find(b"\n", position)) >= 0:
            length += newline - position
            if foreign:
                foreign = False
            else:
                number += 1
                if not kept and length <= max_bytes:
                    yield Line(number, offset, block[position:newline])
                else:
                    kept += block[position : min(newline, position + max_bytes + 1 - len(kept))]
                    yield Line(number, offset, bytes(kept[:max_bytes]), too_long=length > max_bytes)
                    kept.clear()
            offset += length + 1
            length = 0
            position = newline + 1
            if end is not None and offset >= end:
                return
        length += len(block) - position
        if not foreign:
            kept += block[position : position + max_bytes + 1 - len(kept)]
        if end is not None and offset + length >= end and (foreign or length > max_bytes):
            break
    if not foreign and length:
        yield Line(number + 1, offset, bytes(kept[:max_bytes]), too_long=length > max_bytes)
