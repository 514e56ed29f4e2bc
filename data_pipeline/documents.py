"""What a reader yields: a document, or the reason why something that should be one is not; and ids that lead back to the text.

A document's id is structural, `partition << 32 | ordinal`: the number of the partition that it was read from, and its place among
everything that was read there, before anything was rejected. So any row can be traced to its text by reading one partition again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from data_pipeline.config import Kind

__all__ = ["Document", "Reason", "Rejection", "Stage", "document_id", "ordinal_of", "partition_of"]

_ORDINAL_BITS = 32
_SAMPLE_CHARS = 200


class Stage(StrEnum):
    """Where a document was rejected."""

    READ = "read"
    """It is broken: this counts against the reject budget. Elsewhere it is merely not wanted."""
    JUDGE = "judge"
    DEDUPLICATE = "deduplicate"
    QUALITY = "quality"
    BALANCE = "balance"


class Reason(StrEnum):
    """Why a document was rejected."""

    NOT_JSON = "not-json"
    TOO_DEEP = "too-deep"
    NOT_AN_OBJECT = "not-an-object"
    DUPLICATE_KEY = "duplicate-key"
    NO_TEXT_FIELD = "no-text-field"
    TEXT_NOT_A_STRING = "text-not-a-string"
    INVALID_UTF8 = "invalid-utf8"
    LONE_SURROGATE = "lone-surrogate"
    LINE_TOO_LONG = "line-too-long"
    NOT_CSV = "not-csv"
    FIELD_COUNT = "field-count"
    FIELD_TOO_LARGE = "field-too-large"
    FILE_TOO_LARGE = "file-too-large"
    CORRUPT_COMPRESSION = "corrupt-compression"
    DECOMPRESSION_BUDGET = "decompression-budget"
    CORRUPT_PARQUET = "corrupt-parquet"
    READER_MEMORY = "reader-memory"
    CORRUPT_ARCHIVE = "corrupt-archive"
    UNSAFE_MEMBER = "unsafe-member"
    NESTED_ARCHIVE = "nested-archive"
    UNREADABLE_MEMBER = "unreadable-member"
    MEMBER_TOO_LARGE = "member-too-large"
    TOO_MANY_MEMBERS = "too-many-members"
    EMPTY = "empty"
    TOO_SHORT = "too-short"
    TOO_LONG = "too-long"
    LANGUAGE_UNWANTED = "language-unwanted"
    LANGUAGE_UNCERTAIN = "language-uncertain"
    GOPHER_WORD_COUNT = "gopher-word-count"
    GOPHER_WORD_LENGTH = "gopher-word-length"
    GOPHER_SYMBOLS = "gopher-symbols"
    GOPHER_BULLET_LINES = "gopher-bullet-lines"
    GOPHER_ELLIPSIS_LINES = "gopher-ellipsis-lines"
    GOPHER_ALPHABETIC = "gopher-alphabetic"
    GOPHER_STOP_WORDS = "gopher-stop-words"
    GOPHER_DUPLICATE_LINES = "gopher-duplicate-lines"
    GOPHER_DUPLICATE_PARAGRAPHS = "gopher-duplicate-paragraphs"
    GOPHER_DUPLICATE_LINE_CHARS = "gopher-duplicate-line-chars"
    GOPHER_DUPLICATE_PARAGRAPH_CHARS = "gopher-duplicate-paragraph-chars"
    GOPHER_TOP_NGRAMS = "gopher-top-ngrams"
    GOPHER_DUPLICATE_NGRAMS = "gopher-duplicate-ngrams"
    C4_CURLY_BRACKET = "c4-curly-bracket"
    C4_LOREM_IPSUM = "c4-lorem-ipsum"
    C4_SENTENCES = "c4-sentences"
    FINEWEB_PUNCTUATED_LINES = "fineweb-punctuated-lines"
    FINEWEB_SHORT_LINES = "fineweb-short-lines"
    FINEWEB_DUPLICATE_LINE_CHARS = "fineweb-duplicate-line-chars"
    FINEWEB_NEWLINES = "fineweb-newlines"
    SPAM_REPEATED = "spam-repeated"
    SPAM_URLS = "spam-urls"
    SPAM_DIGITS = "spam-digits"
    SPAM_SYMBOLS = "spam-symbols"
    SPAM_UPPER_CASE = "spam-upper-case"
    SPAM_KEYWORD = "spam-keyword"
    SPAM_BLOBS = "spam-blobs"
    CODE_LINE_LENGTH = "code-line-length"
    CODE_MEAN_LINE_LENGTH = "code-mean-line-length"
    CODE_ALPHANUMERIC = "code-alphanumeric"
    CODE_GENERATED = "code-generated"
    EXACT_DUPLICATE = "exact-duplicate"
    NEAR_DUPLICATE = "near-duplicate"
    BENCHMARK_OVERLAP = "benchmark-overlap"
    NO_TOKENS = "no-tokens"
    PERPLEXITY_LOW = "perplexity-low"
    PERPLEXITY_HIGH = "perplexity-high"
    CLASSIFIED_BAD = "classified-bad"
    OVER_SHARE = "over-share"

    @property
    def stage(self) -> Stage:
        """Where documents are rejected for this reason."""
        return _STAGES.get(self, Stage.READ)

    @property
    def malformed(self) -> bool:
        """True where the input is broken, which counts against the reject budget; false where the document is merely unwanted."""
        return self.stage is Stage.READ


_JUDGED = ("language-", "gopher-", "c4-", "fineweb-", "spam-", "code-")
_STAGES = {
    **dict.fromkeys((Reason.EMPTY, Reason.TOO_SHORT, Reason.TOO_LONG), Stage.JUDGE),
    **{reason: Stage.JUDGE for reason in Reason if reason.startswith(_JUDGED)},
    **dict.fromkeys((Reason.EXACT_DUPLICATE, Reason.NEAR_DUPLICATE, Reason.BENCHMARK_OVERLAP), Stage.DEDUPLICATE),
    **dict.fromkeys((Reason.NO_TOKENS, Reason.PERPLEXITY_LOW, Reason.PERPLEXITY_HIGH, Reason.CLASSIFIED_BAD), Stage.QUALITY),
    Reason.OVER_SHARE: Stage.BALANCE,
}


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
    kind: Kind = "prose"
    markup: Literal["plain", "html"] = "plain"
    """What the text still is when it comes from the reader; cleaning makes plain text of it."""
    metadata: str = ""
    """The fields that the user asked to keep, as a JSON object; empty where there are none."""


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
