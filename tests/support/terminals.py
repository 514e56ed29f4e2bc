"""A terminal that replaces a standard stream."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["terminal_as"]

_END = "<end of the output>"


@contextmanager
def terminal_as(name: str) -> Iterator[Callable[[], str]]:
    """Replace a standard stream with a terminal until the end of the block.

    Yields a function that returns the text that was written to the terminal since its last call. A terminal delivers text in parts
    of any size, so the function writes a mark and reads until it.
    """
    user, program = pty.openpty()
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
