"""A terminal that replaces a standard stream."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_END = "<end of the output>"


@contextmanager
def terminal_as(name: str) -> Iterator[Callable[[], str]]:
    """Replace a standard stream with a terminal of 80 columns and 24 lines until the end of the block.

    Yields a function that returns the text that was written to the terminal since its last call. A terminal delivers text in parts
    of any size, so the function writes a mark and reads until it.
    """
    user, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before, stream = getattr(sys, name), os.fdopen(program, "w", encoding="utf-8")

    def shown() -> str:
        stream.write(_END)
        stream.flush()
        received = b""
        while not received.endswith(_END.encode()):
            received += os.read(user, 10_000)
        return received.decode().removesuffix(_END)

    setattr(sys, name, stream)
    try:
        yield shown
    finally:
        setattr(sys, name, before)
        stream.close()
        os.close(user)


def screen_of(written: str, columns: int = 80) -> list[str]:
    """Return the lines that a terminal of this width shows after this output, with those that have scrolled away.

    It knows what bars and lines use: line feed, carriage return, `ESC [ A` (one line up), `ESC [ K` (clears the rest of the line).
    Colours and trailing spaces are left out.
    """
    rows: list[list[str]] = [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\s\S]", written):
        if part == "\n":
            row, column = row + 1, 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row = max(0, row - 1)
        elif part == "\x1b[K":
            del rows[row][column:]
        elif not part.startswith("\x1b"):
            if column == columns:
                row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += " " * (column + 1 - len(rows[row]))
            rows[row][column] = part
            column += 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    return ["".join(line).rstrip() for line in rows]
