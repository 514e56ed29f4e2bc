"""A terminal that replaces a standard stream."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["shown_on", "terminal_as"]


@contextmanager
def terminal_as(name: str) -> Iterator[int]:
    """Replace a standard stream with a terminal until the end of the block. Yields the descriptor of the user's side."""
    user, program = pty.openpty()
    before, stream = getattr(sys, name), os.fdopen(program, "w", encoding="utf-8")
    setattr(sys, name, stream)
    try:
        yield user
    finally:
        setattr(sys, name, before)
        stream.close()
        os.close(user)


def shown_on(user: int) -> str:
    """Return up to 10,000 bytes of the text that was written to a terminal."""
    return os.read(user, 10_000).decode()
