"""What every reader makes of bytes: text that is valid Unicode, or a rejection that says where it is not.

Text is UTF-8, with or without a byte order mark, and comes out as it went in: nothing is replaced, guessed or left out, so that a
document's bytes are those of the input. What is no UTF-8 (other encodings, overlong forms, encoded surrogates) is rejected whole,
with the first byte that is wrong; UTF-16 and UTF-32 are named by their byte order marks. NUL, mixed line ends, direction marks and
private characters are valid Unicode and are passed on: what becomes of them is for cleaning to say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_pipeline.config import Kind
from data_pipeline.documents import Document, Reason, Rejection

__all__ = ["BOM", "MalformedError", "Origin", "decode", "explain_bytes", "has_surrogate", "metadata_json"]

BOM = b"\xef\xbb\xbf"
_FOREIGN_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_MAX_METADATA_CHARS = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedError(ValueError):
    """A line, row or file holds no document."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Origin:
    """Where documents come from, and what their file says about all of them."""

    path: str
    """The input file, relative to its source; a member of an archive is `archive.tar!/path/of/member`."""
    kind: Kind = "prose"
    markup: Literal["plain", "html"] = "plain"

    def document(self, text: str, line: int, offset: int, metadata: str = "") -> Document:
        """A document that begins there."""
        return Document(text, self.path, line, offset, self.kind, self.markup, metadata)


def decode(data: bytes, origin: Origin, line: int, offset: int, metadata: str = "") -> Document | Rejection:
    """The document whose text is `data`; the byte order mark of a file's beginning is no part of it."""
    text = data.removeprefix(BOM) if offset == 0 else data
    try:
        return origin.document(text.decode("utf-8"), line, offset, metadata)
    except UnicodeDecodeError as error:
        bad_line = line + text.count(b"\n", 0, error.start)
        sample = text[max(error.start - 40, 0) : error.start + 160]
        return Rejection.of_bytes(Reason.INVALID_UTF8, origin.path, bad_line, sample, explain_bytes(text, error))


def explain_bytes(data: bytes, error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are no UTF-8, and what to do about it."""
    for mark, encoding in _FOREIGN_MARKS.items():
        if data.startswith(mark):
            return f"this is {encoding}; convert it to UTF-8"
    return f"byte 0x{data[error.start]:02x} is no UTF-8 ({error.reason}); convert the file to UTF-8"


def has_surrogate(text: str) -> bool:
    """Whether half of a surrogate pair stands alone in it, which no encoding can write."""
    return not text.isascii() and _SURROGATE.search(text) is not None


def metadata_json(fields: Mapping[str, Any], names: Iterable[str]) -> str:
    """The named fields as one compact JSON object with sorted keys; empty where there are none.

    Only strings of at most 65,536 characters, true, false and finite numbers are kept.
    """
    kept = {name: value for name in names if _is_plain(value := fields.get(name))}
    if not kept:
        return ""
    text = json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace").decode() if has_surrogate(text) else text


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_METADATA_CHARS
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
