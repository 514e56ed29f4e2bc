"""Tells the person who waits what is being done: a bar on a terminal, one dense line for each stage elsewhere. All on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

__all__ = ["stage_progress"]

_SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def stage_progress(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes just done; says at the end what was done and how fast."""
    begin = time.monotonic()
    done = 0
    on_terminal = sys.stderr.isatty()
    bar = tqdm(total=total_bytes, desc=name, unit="B", unit_scale=True, leave=False, disable=not on_terminal, dynamic_ncols=True)
    last_line = begin

    def advance(num_bytes: int) -> None:
        nonlocal done, last_line
        done += num_bytes
        bar.update(num_bytes)
        now = time.monotonic()
        if not on_terminal and now - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = now
            _say(f"{name:<9} {done / 1e6:.1f} of {total_bytes / 1e6:.1f} MB, {_rate(done, now - begin)}")

    with bar:
        yield advance
    elapsed_s = time.monotonic() - begin
    _say(f"{name:<9} {done / 1e6:.1f} MB, {_rate(done, elapsed_s)}, {elapsed_s:.1f} s")


def _rate(num_bytes: int, elapsed_s: float) -> str:
    return f"{num_bytes / 1e6 / max(elapsed_s, 1e-9):.1f} MB/s"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress is what this module prints
