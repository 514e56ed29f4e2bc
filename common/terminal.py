"""Text on a terminal: safe to show, in lines that never mix with a progress bar, wrapped between words, coloured."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from typing import IO, Any, Literal, TextIO, cast

_STEERING = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"))
"""Unicode categories of characters that are invisible, or that change how other characters are shown."""
_KEPT = "\n\t\u200c\u200d"  # line feed and tab, and the two joiners, which Persian, Indian scripts and emoji need


def printable(text: str, kept: str = _KEPT) -> str:
    """Return `text` with its number, such as `⟨U+001B⟩`, for each invisible character that a terminal could obey."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in kept or unicodedata.category(one) not in _STEERING else f"⟨U+{ord(one):04X}⟩" for one in text)


class PrintableStream:
    """A text stream to a terminal. It makes all text printable; every other attribute is that of the stream behind it."""

    def __init__(self, stream: IO[str]) -> None:
        self.behind = stream  # the original stream, which writes text unchanged

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
    if not sys.stdout.isatty():
        yield
        return
    with redirect_stdout(cast(TextIO, PrintableStream(sys.stdout))):
        yield


Colour = Literal["red", "yellow", "green"]
_CODES: dict[Colour, int] = {"red": 31, "yellow": 33, "green": 32}
_COLUMNS = 80
_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
_QUIET_S = 1.0  # a bar is shown for work that takes longer than this


def write_line(text: str, stream: IO[str], colour: Colour | None = None) -> None:
    """Write text and a line end. On a terminal, bars are removed before it and drawn again below it, and long lines are wrapped."""
    if not stream.isatty():
        print(text, file=stream, flush=True)
        return
    shown = coloured(_wrapped(text, stream), colour, stream)
    with suppress(ImportError):  # the message may be that packages are missing
        import_module("tqdm").tqdm.write(shown, file=stream)
        stream.flush()
        return
    print(shown, file=stream, flush=True)


def coloured(text: str, colour: Colour | None, stream: IO[str]) -> str:
    """Return text in a colour, if the stream is a terminal that shows colours and NO_COLOR is not set (no-color.org)."""
    plain = colour is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or colour is None else f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def bar_columns(stream: IO[str]) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return shutil.get_terminal_size((_COLUMNS, 24)).columns


class LineHandler(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        levels: dict[int, Colour] = {logging.ERROR: "red", logging.WARNING: "yellow"}
        try:
            colour = next((levels[level] for level in levels if record.levelno >= level), None)
            write_line(self.format(record), self.stream, colour)
        except Exception:
            self.handleError(record)


@contextmanager
def progress_shown(what: str, total: int, stream: IO[str], quiet_s: float = _QUIET_S) -> Iterator[Callable[[], None]]:
    """Yield the function to call after each part. A bar is shown on a terminal for work longer than `quiet_s`."""
    if not stream.isatty():
        yield lambda: None
        return
    shown = import_module("tqdm").tqdm(
        total=total, desc=what, file=stream, leave=False, delay=quiet_s, dynamic_ncols=True, bar_format=_BAR
    )
    with shown as bar:
        yield partial(bar.update, 1)


def _wrapped(text: str, stream: IO[str]) -> str:
    width = max(20, bar_columns(stream) - 1)
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        wrapped = textwrap.wrap(
            line, width, subsequent_indent=f"{indent}  ", drop_whitespace=True, break_on_hyphens=False, replace_whitespace=False
        )
        lines += wrapped or [""]
    return "\n".join(lines)
