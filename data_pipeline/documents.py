"""What a reader yields: a document, or the reason why something that should be one is not; and ids that lead back to the text.

A document's id is structural, `partition << 32 | ordinal`: the number of the partition that it was read from, and its place among
everything that was read there, before anything was rejected. So any row can be traced to its text by reading one partition again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Document", "Reason", "Rejection", "document_id", "ordinal_of", "partition_of"]

_ORDINAL_BITS = 32
_SAMPLE_CHARS = 200


class Reason(StrEnum):
    """Why a document was rejected."""

    EMPTY = "empty"
    TOO_SHORT = "too-short"
    TOO_LONG = "too-long"
    NOT_JSON = "not-json"
    TOO_DEEP = "too-deep"
    NOT_AN_OBJECT = "not-an-object"
    DUPLICATE_KEY = "duplicate-key"
    NO_TEXT_FIELD = "no-text-field"
    TEXT_NOT_A_STRING = "text-not-a-string"
    INVALID_UTF8 = "invalid-utf8"
    LONE_SURROGATE = "lone-surrogate"
    LINE_TOO_LONG = "line-too-long"
    FILE_TOO_LARGE = "file-too-large"
    CORRUPT_COMPRESSION = "corrupt-compression"
    DECOMPRESSION_BUDGET = "decompression-budget"

    @property
    def malformed(self) -> bool:
        """True where the input is broken, which counts against the reject budget; false where the document is merely unwanted."""
        return self not in (Reason.EMPTY, Reason.TOO_SHORT, Reason.TOO_LONG)


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from."""

    text: str
    path: str
    """The input file, relative to its source."""
    line: int
    """Number of its first line, from 1, counted from the start of the partition's part of the file."""
    offset: int
    """Its first byte in the (decompressed) file."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Something that was read and is not kept: counted by reason, and shown to those who ask."""

    reason: Reason
    path: str
    line: int
    detail: str = ""
    sample: str = ""

    @staticmethod
    def of(document: Document, reason: Reason, detail: str = "") -> Rejection:
        """A well-formed document that is not wanted."""
        return Rejection(reason, document.path, document.line, detail, document.text[:_SAMPLE_CHARS])

    @staticmethod
    def of_bytes(reason: Reason, path: str, line: int, data: bytes = b"", detail: str = "") -> Rejection:
        """Bytes that did not become a document."""
        return Rejection(reason, path, line, detail, data[:_SAMPLE_CHARS].decode("utf-8", "backslashreplace"))


def document_id(partition: int, ordinal: int) -> int:
    """The id of the `ordinal`-th document read from a partition.

    Raises:
        OverflowError: one of the numbers does not fit in 32 bits.
    """
    if not (0 <= partition < 1 << _ORDINAL_BITS and 0 <= ordinal < 1 << _ORDINAL_BITS):
        raise OverflowError(f"partition {partition}, document {ordinal}: both must fit in {_ORDINAL_BITS} bits")
    return partition << _ORDINAL_BITS | ordinal


def partition_of(identity: int) -> int:
    """The number of the partition that a document was read from: an index into the manifest's `partitions`."""
    return identity >> _ORDINAL_BITS


def ordinal_of(identity: int) -> int:
    """A document's place among everything read from its partition."""
    return identity & ((1 << _ORDINAL_BITS) - 1)
