"""Read the members of tar and zip archives as streams. No member is written to disk.

Python's own modules keep a record of every member, follow header chains of any length, and trust stated sizes. Links, devices, and
names that are absolute or lead out are rejected. Two members of one name are both read.

Formats: POSIX.1-2017 `pax`, ustar and the GNU long names; PKWARE APPNOTE 6.3.10 with ZIP64.
"""

from __future__ import annotations

import re
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from data_pipeline.config import LimitConfig
from data_pipeline.documents import Reason, Rejection
from data_pipeline.sources.formats import FORMATS, Shape, count_extension, is_hidden, printable, shape_of
from data_pipeline.sources.streams import Budget, Compression, Readable, StreamError, decompress

_BLOCK = 512
_MAX_SHOWN_CHARS = 500
_MAX_HEADER_BYTES = 1 << 20  # of a long name or a pax header; ordinary ones have a few hundred bytes


class ArchiveError(StreamError):
    """No further member of the archive can be read. Any other StreamError affects one member only."""


@dataclass(frozen=True)
class Member:
    path: str  # for messages and documents: `archive.tar!/path/of/member`
    shape: Shape
    blocks: Iterator[bytes] = field(repr=False)  # can be read only until the next member is requested


class ByteReader:
    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")
        self.position = 0

    def take(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes in blocks, or fewer at the end of the stream."""
        while size:
            if not self._rest:
                self._rest = memoryview(next(self._blocks, b""))
                if not self._rest:
                    return
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            self.position += len(piece)
            yield bytes(piece)

    def exactly(self, size: int) -> Iterator[bytes]:
        for block in self.take(size):
            size -= len(block)
            yield block
        if size:
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, f"{size} bytes of a member are missing; the file is truncated")

    def read(self, size: int) -> bytes:
        return b"".join(self.take(size))

    def skip(self, size: int) -> None:
        for _ in self.exactly(size):
            pass


def read_tar(
    blocks: Iterator[bytes], path: str, limits: LimitConfig, ignored: Counter[str] | None = None
) -> Iterator[Member | Rejection]:
    """Yield text members, and a rejection for each refused one. Unknown formats are counted in `ignored`, by extension."""
    reader = ByteReader(_outermost(blocks))
    census = _Census(path, limits, ignored)
    extra: dict[str, str] = {}
    while (header := _read_header(reader)) is not None:
        census.count()
        if header.type in b"LKxg":
            extra |= _read_extra(reader, header)
            continue
        name, size = extra.get("path", header.name), header.size
        if (given := extra.get("size")) is not None:  # for members over 8 GiB
            if not (given.isascii() and given.isdigit() and len(given) < 20):
                raise ArchiveError(Reason.CORRUPT_ARCHIVE, "the size in a pax header is not a valid number")
            size = int(given)
        is_sparse = header.type == b"S" or _PAX_SPARSE in extra
        extra = {}
        if header.type in b"123456":
            if header.type != b"5":
                yield census.refuse(name, Reason.UNSAFE_MEMBER, f"it is a {_TAR_TYPES[header.type]}, not a regular file")
            continue
        padded = size + -size % _BLOCK
        if header.type in b"0\x007" and not is_sparse and not name.endswith("/"):
            position = reader.position
            item = census.judge(name, size, partial(reader.exactly, size))
            if item is not None:
                yield item
            reader.skip(padded - (reader.position - position))
            continue
        if header.type not in b"0\x007" or is_sparse:
            yield census.refuse(name, Reason.UNREADABLE_MEMBER, "it is a sparse file, or of an unknown type")
        reader.skip(padded)


def read_zip(
    file: Readable, num_bytes: int, path: str, limits: LimitConfig, ignored: Counter[str] | None = None
) -> Iterator[Member | Rejection]:
    census = _Census(path, limits, ignored)
    read_bytes = 0

    budget = Budget(limits, lambda: read_bytes)  # of all members together
    data = _Bytes(file, num_bytes)
    for entry in _read_directory(data, *_find_directory(data)):
        census.count()
        if entry.is_folder:
            continue
        if entry.refusal:
            yield census.refuse(entry.name, *entry.refusal)
            continue
        read_bytes += entry.compressed
        if read_bytes > num_bytes:
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, "its members overlap")
        item = census.judge(entry.name, entry.size, partial(_content, data, entry, limits, budget))
        if item is not None:
            yield item


class _Census:
    def __init__(self, path: str, limits: LimitConfig, ignored: Counter[str] | None) -> None:
        self._path = path
        self._ignored = Counter() if ignored is None else ignored
        self._limits = limits
        self._members = 0

    def count(self) -> None:
        self._members += 1
        if self._members > self._limits.max_archive_members:
            raise ArchiveError(
                Reason.TOO_MANY_MEMBERS,
                f"more than limits.max_archive_members = {self._limits.max_archive_members}; raise it if you trust the archive",
            )

    def refuse(self, name: str, reason: Reason, detail: str) -> Rejection:
        return Rejection(reason, self._shown(name), 0, detail)

    def judge(self, name: str, size: int, blocks: Callable[[], Iterator[bytes]]) -> Member | Rejection | None:
        """Return the member, or a rejection if it is refused, or None if its extension is not that of a text format."""
        parts = re.split(r"[/\\]", name)
        if not name or not parts[0] or ".." in parts or parts[0].endswith(":") or "\0" in name:
            return self.refuse(name, Reason.UNSAFE_MEMBER, "its name is absolute or leads out of the archive")
        shape = shape_of(name)
        if is_hidden(name):
            return None
        if shape is None:
            count_extension(name, self._ignored)
            return None
        if shape.format not in FORMATS:
            return self.refuse(name, Reason.NESTED_ARCHIVE, "an archive in an archive is not read; unpack it first")
        if size > self._limits.max_member_bytes:
            return self.refuse(name, Reason.MEMBER_TOO_LARGE, f"{size} bytes; see limits.max_member_bytes")
        return Member(self._shown(name), shape, blocks())

    def _shown(self, name: str) -> str:
        end = printable(name[-_MAX_SHOWN_CHARS:])
        return f"{self._path}!/{'' if len(name) <= _MAX_SHOWN_CHARS else '…'}{end}"


def _outermost(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Turn an error in the bytes of the archive itself into an ArchiveError, because it ends the whole archive."""
    try:
        yield from blocks
    except StreamError as error:
        raise ArchiveError(error.reason, error.detail) from None


_TAR_TYPES = {b"1": "hard link", b"2": "symbolic link", b"3": "device", b"4": "device", b"6": "pipe"}


class _Header(NamedTuple):
    name: str
    size: int
    type: bytes


def _read_header(reader: ByteReader) -> _Header | None:
    block = reader.read(_BLOCK)
    if not block or block == bytes(_BLOCK):
        return None
    if len(block) < _BLOCK:
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, "it ends in the middle of a header; the file is truncated")
    # The checksum is the sum of the bytes, with spaces in its own field. Some old programs add signed bytes.
    given, without = _number(block[148:156]), block[:148] + b" " * 8 + block[156:]
    if given not in (sum(without), sum(without) - 256 * sum(byte > 127 for byte in without)):
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, "the checksum of a header is wrong; the file is damaged or not a tar archive")
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    size = _number(block[124:136])
    if size < 0:
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, "the size in a header is not a valid number")
    return _Header(name, size, block[156:157])


def _read_extra(reader: ByteReader, header: _Header) -> dict[str, str]:
    """Return the fields that an extra header gives for the next member: `path`, `size` and a mark for sparse files."""
    if header.size > _MAX_HEADER_BYTES:
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, f"an extra header has {header.size} bytes, more than {_MAX_HEADER_BYTES}")
    data = reader.read(header.size + -header.size % _BLOCK)[: header.size]
    if len(data) < header.size:
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, "it ends in the middle of a header; the file is truncated")
    if header.type == b"x":
        return _parse_pax(data)
    return {"path": _text(data)} if header.type == b"L" else {}


_PAX_SPARSE = "GNU.sparse."
_MAX_PAX_RECORDS = 10_000  # ordinary headers have fewer than a hundred


def _parse_pax(data: bytes) -> dict[str, str]:
    r"""Return the needed fields of a pax header. Its records are `LENGTH KEY=VALUE\n`; LENGTH is that of the whole record."""
    found = {}
    data, start, num_records = data.rstrip(b"\0"), 0, 0
    while start < len(data):
        length, space, _ = data[start : start + 20].partition(b" ")
        end = start + int(length) if length.isdigit() else 0
        if not space or not start + len(length) + 2 < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, "a record of a pax header is malformed")
        key, _, value = data[start + len(length) + 1 : end - 1].partition(b"=")
        if key.startswith(_PAX_SPARSE.encode()):
            found[_PAX_SPARSE] = ""
        elif (name := _text(key)) in ("path", "size"):
            found[name] = value.decode("utf-8", "backslashreplace")
        num_records += 1
        if num_records > _MAX_PAX_RECORDS:
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, f"a pax header has more than {_MAX_PAX_RECORDS} records")
        start = end
    return found


def _number(data: bytes) -> int:
    """Return a number of a header, in octal digits or, if the first bit is set, in binary; -1 if it is invalid."""
    if data[0] & 0x80:
        return int.from_bytes(bytes([data[0] & 0x7F]) + data[1:], "big") if not data[0] & 0x40 else -1
    digits = data.strip(b" \0")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else -1


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


class _Entry(NamedTuple):
    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    mode: int  # Unix file mode; 0 if the archive does not state it
    start: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/") or stat.S_ISDIR(self.mode)

    @property
    def refusal(self) -> tuple[Reason, str] | None:
        if stat.S_IFMT(self.mode) not in (0, stat.S_IFREG):
            return Reason.UNSAFE_MEMBER, "it is a link or device, not a regular file"
        if self.flags & 1:
            return Reason.UNREADABLE_MEMBER, "it is encrypted"
        if self.method not in _METHODS:
            return Reason.UNREADABLE_MEMBER, f"compression method {self.method} is not supported"
        return None


_END = struct.Struct("<4sHHHHLLH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQHHLLQQQQ")
_ENTRY = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_LOCAL = struct.Struct("<4sHHHHHLLLHH")
_MAX_COMMENT_BYTES = 1 << 16
_METHODS: dict[int, Compression] = {0: "none", 8: "deflate", 12: "bz2", 93: "zst"}


def _find_directory(file: _Bytes) -> tuple[int, int]:
    tail_start = max(file.num_bytes - _END.size - _MAX_COMMENT_BYTES - _END_64_LOCATOR.size, 0)
    tail = file.at(tail_start, file.num_bytes - tail_start)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or len(tail) < found + _END.size:
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, "it has no directory; the file is truncated or not a zip archive")
    *_, size, start, _ = _END.unpack_from(tail, found)
    end = tail_start + found
    locator = found - _END_64_LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
        end = _END_64_LOCATOR.unpack_from(tail, locator)[2]
        record = file.at(end, _END_64.size)
        if len(record) < _END_64.size or record[:4] != b"PK\6\6":
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, "the offset of its directory is wrong")
        *_, size, start = _END_64.unpack(record)
    if start + size > end:
        raise ArchiveError(Reason.CORRUPT_ARCHIVE, "the offset of its directory is wrong")
    return start, size


def _read_directory(file: _Bytes, start: int, size: int) -> Iterator[_Entry]:
    reader = ByteReader(file.range(start, size))
    while size:
        fixed = reader.read(_ENTRY.size)
        if len(fixed) < _ENTRY.size or fixed[:4] != b"PK\1\2":
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, "its directory is damaged")
        fields = _ENTRY.unpack(fixed)
        _, made_by, _, flags, method, _, _, crc, compressed, num_bytes, *lengths, _, _, attributes, begin = fields
        raw_name, extra, _ = (reader.read(length) for length in lengths)
        sizes = _zip64_sizes(extra, (num_bytes, compressed, begin))
        name = raw_name.decode("utf-8" if flags & 0x800 else "cp437", "backslashreplace")
        mode = attributes >> 16 if made_by >> 8 == 3 else 0
        yield _Entry(name, raw_name, flags, method, crc, sizes[1], sizes[0], mode, sizes[2])
        size -= _ENTRY.size + sum(lengths)
        if size < 0:
            raise ArchiveError(Reason.CORRUPT_ARCHIVE, "its directory is damaged")


def _zip64_sizes(extra: bytes, sizes: tuple[int, int, int]) -> list[int]:
    """Return size, compressed size and offset of a member. Values that do not fit in 32 bits are in an extra field."""
    large, start = b"", 0
    while start + 4 <= len(extra) and not large:
        tag, length = struct.unpack_from("<HH", extra, start)
        large = extra[start + 4 : start + 4 + length] if tag == 1 else b""
        start += 4 + length
    result = []
    for size in sizes:
        is_large = size == 0xFFFFFFFF and len(large) >= 8
        result.append(int.from_bytes(large[:8], "little") if is_large else size)
        large = large[8:] if is_large else large
    return result


def _content(file: _Bytes, entry: _Entry, limits: LimitConfig, budget: Budget) -> Iterator[bytes]:
    local = file.at(entry.start, _LOCAL.size + len(entry.raw_name))
    if len(local) < _LOCAL.size or local[:4] != b"PK\3\4" or local[_LOCAL.size :] != entry.raw_name:
        raise StreamError(Reason.CORRUPT_ARCHIVE, "the archive's directory names another file at this offset")
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(local)
    blocks = file.range(entry.start + _LOCAL.size + name_bytes + extra_bytes, entry.compressed)
    checksum = num_bytes = 0
    for block in decompress(blocks, _METHODS[entry.method], limits, budget):
        num_bytes += len(block)
        if num_bytes > entry.size:
            break
        checksum = zlib.crc32(block, checksum)
        yield block
    if num_bytes != entry.size or checksum != entry.crc:
        raise StreamError(Reason.CORRUPT_ARCHIVE, "its size or CRC-32 differs from the archive's directory")


class _Bytes:
    """Random access to an open file. An offset beyond the end, which an archive may state, gives no bytes."""

    def __init__(self, file: Readable, num_bytes: int) -> None:
        self._file = file
        self.num_bytes = num_bytes

    def at(self, start: int, size: int) -> bytes:
        if start >= self.num_bytes:
            return b""
        self._file.seek(start)
        return self._file.read(min(size, self.num_bytes - start))

    def range(self, start: int, size: int) -> Iterator[bytes]:
        while size > 0 and (block := self.at(start, min(size, 1 << 18))):
            yield block
            start, size = start + len(block), size - len(block)
