"""Makes text of strangers safe for a terminal: it cannot move the cursor, change colours or the title, or reorder characters."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any, TextIO, cast

__all__ = ["PrintableStream", "printable", "printable_stdout"]

_STEERING = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"))
"""Unicode categories of characters that are invisible, or that change how other characters are shown."""
_KEPT = "\n\t\u200c\u200d"
"""Line feed and tab, and the two joiners, which Persian, Indian scripts and emoji need."""


def printable(text: str, kept: str = _KEPT) -> str:
    """Return `text` with its number, such as `⟨U+001B⟩`, for each invisible character that a terminal could obey."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in kept or unicodedata.category(one) not in _STEERING else f"⟨U+{ord(one):04X}⟩" for one in text)


class PrintableStream:
    """A text stream to a terminal. It makes all text printable; every other attribute is that of the stream behind it."""

    def __init__(self, stream: IO[str]) -> None:
        self.behind = stream
        """The original stream, which writes text unchanged."""

    def write(self, text: str) -> int:
        self.behind.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


@contextmanager
def printable_stdout() -> Iterator[None]:
    """Make all output printable within the context, if stdout is a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    with redirect_stdout(cast(TextIO, PrintableStream(sys.stdout))):
        yield
