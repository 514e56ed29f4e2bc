r"""The first clean stage: one way to write a line end, no control characters, one Unicode form; and the length that is kept.

Policy, in this order: CRLF and lone CR become LF; control characters (Unicode category Cc) other than tab and LF are removed;
the text is put in form NFC unless `clean.unicode` is none; white space at the end is removed. Nothing else is touched: direction
marks, private characters and non-characters stay as the author wrote them.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from data_pipeline.config import CleanSettings
from data_pipeline.documents import Document, Reason, Rejection

__all__ = ["Cleaned", "clean", "judge_length"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A text put in order, and what had to be done to it."""

    text: str
    changes: tuple[str, ...]
    """Among `newlines`, `control-characters` and `unicode`; counted in the report."""


def clean(text: str, settings: CleanSettings) -> Cleaned:
    """The text under the policy of this module. Cleaning it again changes nothing."""
    changes = []
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        changes.append("newlines")
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
        changes.append("control-characters")
    if settings.unicode == "nfc" and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
        changes.append("unicode")
    return Cleaned(text.rstrip(), tuple(changes))


def judge_length(document: Document, settings: CleanSettings) -> Rejection | None:
    """Why a cleaned document is too short or too long, or nothing."""
    characters = len(document.text)
    if not characters:
        return Rejection.of(document, Reason.EMPTY)
    if characters < settings.min_chars:
        return Rejection.of(document, Reason.TOO_SHORT, f"{characters} characters, clean.min_chars = {settings.min_chars}")
    if settings.max_chars is not None and characters > settings.max_chars:
        return Rejection.of(document, Reason.TOO_LONG, f"{characters} characters, clean.max_chars = {settings.max_chars}")
    return None
