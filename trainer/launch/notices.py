"""What the launcher says about the ranks: whole lines on stderr."""

from __future__ import annotations

import os
from contextlib import suppress

from common.terminal import printable

__all__ = ["say"]

_STDERR = 2


def say(line: str) -> None:
    """Writes a line of the launcher to stderr, also inside a signal handler, where a buffered stream may be in use.

    A reader that has left changes nothing: the ranks are waited for all the same.
    """
    with suppress(OSError):
        os.write(_STDERR, f"train: {printable(line)}\n".encode(errors="backslashreplace"))
