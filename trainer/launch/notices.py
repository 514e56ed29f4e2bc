"""Messages of the launcher about the ranks: whole lines on stderr."""

from __future__ import annotations

import os
from contextlib import suppress

from common.terminal import printable

__all__ = ["say"]

_STDERR = 2


def say(line: str) -> None:
    """Write a line of the launcher to stderr.

    This is safe inside a signal handler, where a buffered stream may be in use. Write errors are ignored, because the launcher must
    keep waiting for its ranks.
    """
    with suppress(OSError):
        os.write(_STDERR, f"train: {printable(line)}\n".encode(errors="backslashreplace"))
