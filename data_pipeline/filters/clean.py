r"""The first clean stage: one way to write a line end, no control characters, one Unicode form; and the length that is kept.

Policy, in this order, each rule counted by its name:

- `newlines`: CRLF and lone CR become LF.
- `mojibake`: UTF-8 that was once read in a single-byte encoding (`cafÃ©`, `itâ€™s`) is repaired by ftfy, line by line, in
  lines that show the signs. None of ftfy's other opinions (quotes, ligatures, widths) applies.
- `control-characters`: Unicode category Cc other than tab and LF is removed.
- `unicode`: form NFC.
- the names of `clean.drop_lines`, and `repeats`: lines that are unwanted, or equal one shortly before, are removed.
- White space at the end goes, uncounted.

Code has its line ends and control characters put in order and nothing else. Direction marks, private characters and non-characters
stay as the author wrote them. The rules run until none changes anything, so that cleaning a clean text changes nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import ftfy

from data_pipeline.config import CleanSettings, Kind
from data_pipeline.config.text import LineRule
from data_pipeline.documents import Document, Reason, Rejection

__all__ = ["LINE_ENDS", "NOTICES", "Cleaned", "clean", "judge_length"]

NOTICES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
"""What the notices say that C4 removes by the line."""
LINE_ENDS = (".", "?", "!", '"', "'", "”", "’", "。", "？", "！")  # noqa: RUF001
"""With one of these, but not with three dots, ends a line that C4 keeps."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MIN_LINE_WORDS = 5
_MAX_WORD_CHARS = 1000

# The bytes 0x80 to 0xbf as Latin-1 and Windows-1252 show them; a space stands where a no-break space was lost.
_CONTINUATION = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ ]"  # noqa: RUF001
# Two, three and four bytes of UTF-8 read so, and the commonest pairs read as Mac OS Roman and as code page 437. The first class
# lets the search skip quickly over what cannot begin one: 70 MB/s in French, over 100 in Japanese; ftfy itself runs at 3.
_MOJIBAKE = re.compile(
    rf"[Â-ô\u201aΓ√](?:(?<=[Â-ß]){_CONTINUATION}|(?<=[à-ï]){_CONTINUATION}{{2}}|(?<=[ð-ô]){_CONTINUATION}{{3}}"
    r"|(?<=\u201a)Ä|(?<=Γ)Ç|(?<=√)[©®°])"
)
Rule = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A text put in order, and what had to be done to it."""

    text: str
    changes: tuple[str, ...]
    """The names of the rules that changed something, in their order; counted in the report."""


def clean(text: str, settings: CleanSettings, kind: Kind = "prose") -> Cleaned:
    """The text under the policy of this module. Cleaning it again changes nothing."""
    rules = _rules(settings, kind)
    changes: dict[str, None] = {}
    before = None
    while text != before:
        before = text
        for name, rule in rules:
            after = rule(text)
            if after != text:
                changes[name] = None
            text = after
        text = text.rstrip()
    return Cleaned(text, tuple(name for name, _ in rules if name in changes))


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


def _rules(settings: CleanSettings, kind: Kind) -> list[tuple[str, Rule]]:
    rules: list[tuple[str, Rule]] = [("newlines", _unify_newlines), ("control-characters", _remove_control_characters)]
    if kind == "code":
        return rules
    if settings.mojibake:
        rules.insert(1, ("mojibake", _repair_mojibake))  # before the control characters go, because it can hold some
    if settings.unicode == "nfc":
        rules.append(("unicode", _compose))
    rules += [(name, _line_rule(name)) for name in settings.drop_lines]
    if settings.repeat_window:
        rules.append(("repeats", lambda text: _remove_repeats(text, settings)))
    return rules


def _unify_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _remove_control_characters(text: str) -> str:
    return _CONTROL.sub("", text) if _CONTROL.search(text) else text


def _compose(text: str) -> str:
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def _repair_mojibake(text: str) -> str:
    if text.isascii() or not _MOJIBAKE.search(text):
        return text
    return "\n".join(ftfy.fix_encoding(line) if _MOJIBAKE.search(line) else line for line in text.split("\n"))


def _line_rule(name: LineRule) -> Rule:
    unwanted = _UNWANTED[name]
    return lambda text: "\n".join(line for line in text.split("\n") if not line.strip() or not unwanted(line))


def _is_unpunctuated(line: str) -> bool:
    line = line.rstrip()
    return not line.endswith(LINE_ENDS) or line.endswith("...")


_UNWANTED: dict[LineRule, Callable[[str], bool]] = {
    "notices": lambda line: any(notice in line.lower() for notice in NOTICES),
    "javascript": lambda line: "javascript" in line.lower(),
    "unpunctuated": _is_unpunctuated,
    "few-words": lambda line: len(line.split()) < _MIN_LINE_WORDS,
    "long-word": lambda line: any(len(word) > _MAX_WORD_CHARS for word in line.split()),
}


def _remove_repeats(text: str, settings: CleanSettings) -> str:
    """Without the lines (paragraphs) that equal, but for white space, one of the last `repeat_window` that were kept."""
    separator = "\n" if settings.repeats == "lines" else "\n\n"
    kept: list[str] = []
    last_seen: dict[str, int] = {}
    num_kept = 0
    for piece in text.split(separator):
        key = piece.strip()
        if key:
            seen = last_seen.get(key)
            if seen is not None and num_kept - seen <= settings.repeat_window and len(key) >= settings.repeat_min_chars:
                continue
            last_seen[key] = num_kept
            num_kept += 1
        kept.append(piece)
    return separator.join(kept)
