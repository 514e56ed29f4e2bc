"""Documents and rejections, which readers yield, and the ids of documents, `partition << 32 | ordinal`.

The ordinal counts everything that was read in the partition, so the text of any row can be found by reading one partition again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, Literal, Self

from data_pipeline.config import Kind
from data_pipeline.heuristics.presets import PRESETS

_ORDINAL_BITS = 32
_SAMPLE_CHARS = 200


class Stage(StrEnum):
    READ = "read"  # broken input counts against `limits.max_rejected_fraction`; unwanted documents of other stages do not
    JUDGE = "judge"
    DEDUPLICATE = "deduplicate"
    QUALITY = "quality"
    BALANCE = "balance"


class Reason(StrEnum):
    stage: Stage  # the stage that rejects documents for this reason

    def __new__(cls, value: str, *stage: Stage) -> Self:
        """Make a member whose value is the string alone. It takes one stage; `*` lets type checkers accept `Reason("empty")`."""
        member = str.__new__(cls, value)
        member._value_ = value
        (member.stage,) = stage
        return member

    NOT_JSON = "not-json", Stage.READ
    TOO_DEEP = "too-deep", Stage.READ
    NOT_AN_OBJECT = "not-an-object", Stage.READ
    DUPLICATE_KEY = "duplicate-key", Stage.READ
    NO_TEXT_FIELD = "no-text-field", Stage.READ
    TEXT_NOT_A_STRING = "text-not-a-string", Stage.READ
    INVALID_UTF8 = "invalid-utf8", Stage.READ
    LONE_SURROGATE = "lone-surrogate", Stage.READ
    LINE_TOO_LONG = "line-too-long", Stage.READ
    NOT_CSV = "not-csv", Stage.READ
    FIELD_COUNT = "field-count", Stage.READ
    FIELD_TOO_LARGE = "field-too-large", Stage.READ
    FILE_TOO_LARGE = "file-too-large", Stage.READ
    CORRUPT_COMPRESSION = "corrupt-compression", Stage.READ
    DECOMPRESSION_BUDGET = "decompression-budget", Stage.READ
    CORRUPT_PARQUET = "corrupt-parquet", Stage.READ
    CORRUPT_ARROW = "corrupt-arrow", Stage.READ
    READER_MEMORY = "reader-memory", Stage.READ
    CORRUPT_ARCHIVE = "corrupt-archive", Stage.READ
    UNSAFE_MEMBER = "unsafe-member", Stage.READ
    NESTED_ARCHIVE = "nested-archive", Stage.READ
    UNREADABLE_MEMBER = "unreadable-member", Stage.READ
    MEMBER_TOO_LARGE = "member-too-large", Stage.READ
    TOO_MANY_MEMBERS = "too-many-members", Stage.READ
    MESSAGES_MALFORMED = "messages-malformed", Stage.READ
    UNKNOWN_ROLE = "unknown-role", Stage.READ
    NO_ANSWER = "no-answer", Stage.READ
    EQUAL_PAIR = "equal-pair", Stage.READ
    TEMPLATE_REFUSED = "template-refused", Stage.READ
    UNUSED_FIELD = "unused-field", Stage.READ
    EMPTY = "empty", Stage.JUDGE
    TOO_SHORT = "too-short", Stage.JUDGE
    TOO_LONG = "too-long", Stage.JUDGE
    NO_LABEL = "no-label", Stage.JUDGE
    UNKNOWN_LABEL = "unknown-label", Stage.JUDGE
    LANGUAGE_UNWANTED = "language-unwanted", Stage.JUDGE
    LANGUAGE_UNCERTAIN = "language-uncertain", Stage.JUDGE
    _ignore_ = ["members", "name"]  # noqa: RUF012
    members = vars()
    for name in dict.fromkeys(rule.reason for preset in PRESETS.values() for rule in preset.rules):
        members[name.upper().replace("-", "_")] = name, Stage.JUDGE
    EXACT_DUPLICATE = "exact-duplicate", Stage.DEDUPLICATE
    NEAR_DUPLICATE = "near-duplicate", Stage.DEDUPLICATE
    BENCHMARK_OVERLAP = "benchmark-overlap", Stage.DEDUPLICATE
    NO_TOKENS = "no-tokens", Stage.QUALITY
    EQUAL_IDS = "equal-ids", Stage.QUALITY
    TOO_MANY_TOKENS = "too-many-tokens", Stage.QUALITY
    PERPLEXITY_LOW = "perplexity-low", Stage.QUALITY
    PERPLEXITY_HIGH = "perplexity-high", Stage.QUALITY
    CLASSIFIED_BAD = "classified-bad", Stage.QUALITY
    OVER_SHARE = "over-share", Stage.BALANCE

    @property
    def malformed(self) -> bool:
        return self.stage is Stage.READ


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    path: str  # the input file, relative to its source
    line: int  # the number of its first line, from 1, counted from the start of the partition's part of the file
    offset: int  # the position of its first byte in the decompressed file
    kind: Kind = "prose"
    markup: Literal["plain", "html", "chat"] = "plain"  # as read: cleaning makes `plain` of `html`, a template of `chat`
    metadata: str = ""  # the fields that `records.metadata` names, as a JSON object; empty if there are none
    parts: tuple[int, ...] = ()  # lengths in characters, alternately without and with a loss; empty: a loss on everything
    special: tuple[int, ...] = ()  # lengths in characters, alternately text and special token; empty: no conversation
    unread: tuple[str, ...] = ()  # the fields of its record that no setting names and no conversation has

    @property
    def pieces(self) -> list[str]:
        return cut_text(self.text, self.parts)


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: Reason
    path: str
    line: int
    detail: str = ""
    sample: str = ""
    document: Document | None = field(default=None, compare=False, repr=False)  # as judged, after cleaning; None: no document
    data: bytes = field(default=b"", compare=False, repr=False)  # the bytes that did not become a document
    fields: tuple[str, ...] = field(default=(), compare=False, repr=False)  # of a record that lacks a needed one

    @staticmethod
    def of(document: Document, reason: Reason, detail: str = "") -> Rejection:
        return Rejection(reason, document.path, document.line, detail, document.text[:_SAMPLE_CHARS], document)

    @staticmethod
    def of_bytes(
        reason: Reason, path: str, line: int, data: bytes = b"", detail: str = "", *, first: int = 0, fields: tuple[str, ...] = ()
    ) -> Rejection:
        sample = data[first : first + _SAMPLE_CHARS].decode("utf-8", "backslashreplace")
        return Rejection(reason, path, line, detail, sample, data=data, fields=fields)

    @property
    def shown(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("reason", "path", "line", "detail", "sample")}


def cut_text(text: str, parts: Sequence[int]) -> list[str]:
    """Return the parts of these lengths in characters; the whole text if there are none."""
    ends = list(accumulate(parts)) or [len(text)]
    return [text[start:end] for start, end in pairwise([0, *ends])]


def document_id(partition: int, ordinal: int) -> int:
    """Return the id of the document at place `ordinal`, from 0. Both numbers must fit in 32 bits."""
    if not (0 <= partition < 1 << _ORDINAL_BITS and 0 <= ordinal < 1 << _ORDINAL_BITS):
        raise OverflowError(f"partition {partition}, document {ordinal}: both must fit in {_ORDINAL_BITS} bits")
    return partition << _ORDINAL_BITS | ordinal


def partition_of(identity: int) -> int:
    return identity >> _ORDINAL_BITS
