from __future__ import annotations

import os
from contextlib import suppress

from common.terminal import printable

_STDERR = 2
_CLEAR_LINE = "\r\x1b[K"


def log_line(line: str) -> None:
    """Safe inside a signal handler, where a buffered stream may be in use. Write errors are ignored: the launcher must wait for its
    ranks. The line replaces the bar of rank 0, which is drawn again below it.
    """
    with suppress(OSError):
        clear = _CLEAR_LINE if os.isatty(_STDERR) else ""
        os.write(_STDERR, f"{clear}train: {printable(line)}\n".encode(errors="backslashreplace"))
