r"""Cleaning of texts, and the check of their length. The rules apply in this order and count what they change by name:

- `newlines`: CRLF and lone CR become LF.
- `mojibake`: UTF-8 that was decoded with a single-byte encoding (`cafÃ©`, `itâ€™s`) is repaired by ftfy, in the lines that look
  like it. ftfy's other changes (quotes, ligatures, widths) are not made.
- `control-characters`: Unicode category Cc other than tab and LF is removed. Those that separate texts, such as a form feed, leave
  a space between two characters.
- `unicode`: form NFC.
- the names in `clean.drop_lines`: these lines are removed.
- `repeats`: a line or paragraph that equals one shortly before it is removed.
- White space at the end of the text is removed, which is not counted.

In code, only `newlines` and `control-characters` apply. The rules run until none changes anything.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ftfy

from data_pipeline.config import CleanConfig, Kind
from data_pipeline.config.text import LineRule
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.heuristics.presets import LINE_ENDS, MAX_WORD_CHARS, NOTICES

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]+")
_SEPARATING = {"\0", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85"}
_MIN_LINE_WORDS = 5

# The bytes 0x80 to 0xbf as Latin-1 and Windows-1252 show them, and a space, which may have been a no-break space.
_CONTINUATION = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ ]"  # noqa: RUF001
# Two, three and four bytes of UTF-8 decoded in this way, and the commonest pairs decoded as Mac OS Roman and code page 437. The
# first character class makes the search fast: 70 MB/s in French, over 100 MB/s in Japanese; ftfy itself does 3 MB/s.
_MOJIBAKE = re.compile(
    rf"[Â-ô\u201aΓ√](?:(?<=[Â-ß]){_CONTINUATION}|(?<=[à-ï]){_CONTINUATION}{{2}}|(?<=[ð-ô]){_CONTINUATION}{{3}}"
    r"|(?<=\u201a)Ä|(?<=Γ)Ç|(?<=√)[©®°])"
)
Rule = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Cleaned:
    text: str
    changes: tuple[str, ...]  # the names of the rules that changed the text, in the order of the rules. The report counts them.


def clean(text: str, settings: CleanConfig, kind: Kind = "prose", *, keep_end: bool = False) -> Cleaned:
    """Apply all rules. Cleaning again changes nothing. With `keep_end` another part of the document follows the text."""
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
        text = text if keep_end else text.rstrip()
    return Cleaned(text, tuple(name for name, _ in rules if name in changes))


def judge_length(document: Document, settings: CleanConfig) -> Rejection | None:
    characters = len(document.text)
    if not characters:
        return Rejection.of(document, Reason.EMPTY)
    if document.parts and not any(piece.strip() for piece in document.pieces[1::2]):
        return Rejection.of(document, Reason.EMPTY, "only the prompt has text, so there is nothing to train on")
    if characters < settings.min_chars:
        return Rejection.of(document, Reason.TOO_SHORT, f"{characters} characters, clean.min_chars = {settings.min_chars}")
    if settings.max_chars is not None and characters > settings.max_chars:
        return Rejection.of(document, Reason.TOO_LONG, f"{characters} characters, clean.max_chars = {settings.max_chars}")
    return None


def _rules(settings: CleanConfig, kind: Kind) -> list[tuple[str, Rule]]:
    newlines = ("newlines", lambda text: text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text)
    control = ("control-characters", _without_control)
    if kind == "code":
        return [newlines, control]
    # Mojibake is repaired before control characters are removed: it can contain some.
    rules: list[tuple[str, Rule]] = [newlines, *([("mojibake", _repair_mojibake)] if settings.mojibake else []), control]
    if settings.unicode == "nfc":
        rules.append(("unicode", lambda text: unicodedata.normalize("NFC", text)))
    rules += [(name, partial(_without_lines, _UNWANTED[name])) for name in settings.drop_lines]
    if settings.repeat_window:
        rules.append(("repeats", lambda text: _remove_repeats(text, settings)))
    return rules


def _without_control(text: str) -> str:
    def replacement(found: re.Match[str]) -> str:
        around = text[max(found.start() - 1, 0) : found.start()].strip() and text[found.end() : found.end() + 1].strip()
        return " " if around and not _SEPARATING.isdisjoint(found[0]) else ""

    return _CONTROL.sub(replacement, text) if _CONTROL.search(text) else text


def _repair_mojibake(text: str) -> str:
    if text.isascii() or not _MOJIBAKE.search(text):
        return text
    return "\n".join(ftfy.fix_encoding(line) if _MOJIBAKE.search(line) else line for line in text.split("\n"))


def _without_lines(is_unwanted: Callable[[str], bool], text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.strip() or not is_unwanted(line))


_UNWANTED: dict[LineRule, Callable[[str], bool]] = {
    "notices": lambda line: any(notice in line.lower() for notice in NOTICES),
    "javascript": lambda line: "javascript" in line.lower(),
    "unpunctuated": lambda line: not line.rstrip().endswith(LINE_ENDS) or line.rstrip().endswith("..."),
    "few-words": lambda line: len(line.split()) < _MIN_LINE_WORDS,
    "long-word": lambda line: any(len(word) > MAX_WORD_CHARS for word in line.split()),
}


def _remove_repeats(text: str, settings: CleanConfig) -> str:
    """Remove the lines (or paragraphs) that equal one of the last `repeat_window` kept ones, ignoring white space around them."""
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
