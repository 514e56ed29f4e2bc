"""Read and decompress bytes and lines of input files, in constant memory and within the limits for hostile input."""

from __future__ import annotations

import bz2
import codecs
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

import zstandard

from data_pipeline.config import LimitConfig
from data_pipeline.documents import Reason

Compression = Literal["none", "gz", "zst", "xz", "bz2", "deflate"]  # deflate: only within zip archives

_BLOCK_BYTES = 1 << 18
_EXPANSION_GRACE_BYTES = 1 << 20  # a small file of spaces exceeds any sensible ratio, but is harmless
_MEMBER_BYTES = 1 << 14  # charge for each further member, stream or frame: an empty one has 9 to 32 bytes and takes time
_PIECE_BYTES = 1 << 16
_ZSTD_INPUT_BYTES = 64  # decompressed at a time: each 4 bytes expand to at most 128 KiB


class Readable(Protocol):
    """An open file, local or in a store. Offsets count from its beginning. At its end `read` returns nothing."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> object: ...
    def tell(self) -> int: ...


class StreamError(Exception):
    """The rest of a file cannot be read. The documents before the error are valid."""

    def __init__(self, reason: Reason, detail: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.fields = fields  # of a table that lacks a needed column


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    offset: int  # of its first byte in the decompressed file
    data: bytes  # without its newline; its beginning if it is too long
    too_long: bool = False


class Budget:
    """Limits the bytes that decompression may produce, in total and for each compressed byte of the outermost file.

    All data at one level of a file shares one budget, such as all members of an archive: many small bombs count as one.
    """

    def __init__(self, limits: LimitConfig, consumed: Callable[[], int]) -> None:
        self._limits = limits
        self._consumed = consumed
        self._produced = 0

    def charge(self, num_bytes: int) -> None:
        """StreamError if the budget is exceeded."""
        self._produced += num_bytes
        went_in = self._consumed()
        allowed = min(self._limits.max_decompressed_bytes, max(went_in * self._limits.max_expansion, _EXPANSION_GRACE_BYTES))
        if self._produced > allowed:
            raise StreamError(
                Reason.DECOMPRESSION_BUDGET,
                f"{went_in} compressed bytes expand to more than {allowed}; "
                "if you trust the file, raise limits.max_expansion or limits.max_decompressed_bytes",
            )

    def watch(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.charge(len(block))
            yield block


def raw_blocks(file: Readable) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


_ENCODINGS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


def marked_encoding(first: bytes) -> str | None:
    """Return the encoding that the byte order mark at the beginning of a file names; None for UTF-8 and without a mark."""
    return next((name for mark, name in _ENCODINGS.items() if first.startswith(mark)), None)


def as_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the blocks of a file, in UTF-8 if its byte order mark names UTF-16 or UTF-32."""
    first = next(blocks, b"")
    encoding = marked_encoding(first)
    if encoding is None:
        yield from chain((first,) if first else (), blocks)
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for block, is_last in chain(((one, False) for one in chain((first,), blocks)), ((b"", True),)):
            if text := decoder.decode(block, is_last):
                yield text.encode()
    except UnicodeError as error:
        raise StreamError(Reason.INVALID_UTF8, f"its byte order mark names {encoding}, but {error}; convert it to UTF-8") from None


def join_blocks(blocks: Iterator[bytes], max_bytes: int) -> tuple[bytes, bool]:
    """Return the bytes of all blocks and True, or the first block and False if there are more than `max_bytes`."""
    pieces, num_bytes = [], 0
    for block in blocks:
        pieces.append(block)
        num_bytes += len(block)
        if num_bytes > max_bytes:
            return pieces[0], False
    return b"".join(pieces), True


def decompress(blocks: Iterator[bytes], compression: Compression, limits: LimitConfig, budget: Budget) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members, frames or streams of a file, in blocks of at most 2 MiB."""
    match compression:
        case "gz":
            blocks = _decompress(blocks, lambda: _Zlib(zlib.decompressobj(31)), "gzip", budget, padding=b"\0")
        case "bz2":
            blocks = _decompress(blocks, bz2.BZ2Decompressor, "bzip2", budget)
        case "xz":
            memory = limits.max_window_bytes + _XZ_STATE_BYTES
            blocks = _decompress(blocks, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memory), "xz", budget, padding=b"\0")
        case "zst":
            context = zstandard.ZstdDecompressor(max_window_size=limits.max_window_bytes)
            blocks = _decompress(blocks, lambda: _Zstd(context.decompressobj()), "zstd", budget, piece_bytes=_ZSTD_INPUT_BYTES)
        case "deflate":
            blocks = _decompress(blocks, lambda: _Zlib(zlib.decompressobj(-15)), "deflate", budget)
    return budget.watch(blocks)


_XZ_STATE_BYTES = 1 << 20  # memory of the decoder in addition to the dictionary: 65 KiB for xz -9, more for several filters


class _Zlib:
    """zlib with the interface of bz2 and lzma, which buffer unread input."""

    def __init__(self, member: Any) -> None:
        self._member = member

    @property
    def eof(self) -> bool:
        return bool(self._member.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._member.unused_data)

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes:
        return bytes(self._member.decompress(self._member.unconsumed_tail + data, max_length))


class _Zstd(_Zlib):
    """zstandard, which cannot limit its output and reads all input."""

    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes:
        return bytes(self._member.decompress(data))


_Decoder = bz2.BZ2Decompressor | lzma.LZMADecompressor | _Zlib


def _decompress(
    blocks: Iterator[bytes],
    new: Callable[[], _Decoder],
    name: str,
    budget: Budget,
    padding: bytes = b"",
    piece_bytes: int = _PIECE_BYTES,
) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members of a file. Bytes in `padding` may follow a member."""
    member, started = new(), False
    try:
        # In small pieces, because a decoder copies its remaining input at the end of each member.
        for piece in (block[start : start + piece_bytes] for block in blocks for start in range(0, len(block), piece_bytes)):
            data = piece
            while data or not (member.needs_input or member.eof):
                if member.eof:
                    data = data.lstrip(padding) if padding else data
                    if not data:
                        break
                    member = new()
                    budget.charge(_MEMBER_BYTES)
                started = True
                out = member.decompress(data, _BLOCK_BYTES)
                data = member.unused_data if member.eof else b""
                if out:
                    yield out
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError) as error:
        if "Memory usage limit" in str(error) or "too much memory" in str(error):
            window = "window" if name == "zstd" else "dictionary"
            raise StreamError(Reason.DECOMPRESSION_BUDGET, f"its {name} {window} is over limits.max_window_bytes") from None
        raise StreamError(Reason.CORRUPT_COMPRESSION, f"damaged {name} data: {error}") from None
    if not started or not member.eof:
        raise StreamError(Reason.CORRUPT_COMPRESSION, f"{name} data ends in the middle; the file is truncated")


def read_lines(blocks: Iterator[bytes], max_bytes: int, start: int = 0, end: int | None = None) -> Iterator[Line]:
    """Yield the lines that start at an offset in [start, end). `blocks` must begin at the byte before `start`, if there is one.

    A line longer than `max_bytes` is cut and marked. Reading stops as soon as no further line of the range can start.
    """
    offset = max(start - 1, 0)
    foreign = start > 0  # inside a line that started before the range
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
