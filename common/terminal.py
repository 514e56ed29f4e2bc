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
_KEPT = "\n\t\u200c\u200d"
"""Line feed and tab, and the two joiners that Persian, Indian scripts and emoji are written with."""


def printable(text: str, kept: str = _KEPT) -> str:
    """Return `text` with each invisible character, which a terminal could obey, replaced by its number.

    Escape becomes `⟨U+001B⟩`, and a mark that reverses the direction of text becomes `⟨U+202E⟩`. All visible characters stay.

    Args:
        text: may come from a stranger.
        kept: invisible characters that stay. The default is line feed, tab and the two joiners.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in kept or unicodedata.category(one) not in _STEERING else f"⟨U+{ord(one):04X}⟩" for one in text)


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
