"""Text that may come from a stranger, made safe for a terminal: nothing in it can move the cursor, recolour, retitle or reorder."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any, TextIO, cast

__all__ = ["PrintableStream", "printable", "printable_stdout"]

_STEERING = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"))
"""Unicode categories of characters that show nothing, or that change how others are shown."""
_KEPT = frozenset("\n\t\u200c\u200d")
"""Line feed and tab, and the two joiners that Persian, Indian scripts and emoji are written with."""


def printable(text: str) -> str:
    """`text` with every character named that a terminal would obey instead of show.

    Escape becomes `⟨U+001B⟩`, a mark that reverses the direction of text `⟨U+202E⟩`. Line feeds, tabs and all
    visible characters stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


class PrintableStream:
    """A text stream that shows what is written to it on a terminal, and lets nothing steer that terminal.

    All else is that of the stream behind it.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.behind = stream
        """Takes everything as it is."""

    def write(self, text: str) -> int:
        """Writes `text`, made printable."""
        self.behind.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


@contextmanager
def printable_stdout() -> Iterator[None]:
    """Within it, what is printed is made printable where it goes to a terminal; pipes and files receive it as it is."""
    if not sys.stdout.isatty():
        yield
        return
    with redirect_stdout(cast(TextIO, PrintableStream(sys.stdout))):
        yield


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _STEERING:
        return character
    return f"⟨U+{ord(character):04X}⟩"
