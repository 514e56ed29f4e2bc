"""Shows the current stage and its remaining time on stderr: a bar on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from common.text import duration, size

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_REDRAWS = 1.0
_SECONDS_TO_END = 1.0
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B{postfix}"


class Pace:
    """Speed over the last 60 s, or over the last 32 results if these took longer."""

    _SECONDS = 60.0
    _RESULTS = 32
    _EVIDENCE_SECONDS = 5.0
    _EVIDENCE_RESULTS = 3

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._points = deque([(begin, 0)])
        self._num_results = 0

    @property
    def done(self) -> int:
        return self._points[-1][1]

    def add(self, now: float, num_bytes: int) -> None:
        self._points.append((now, self.done + num_bytes))
        self._num_results += 1
        while len(self._points) > self._RESULTS + 1 and now - self._points[1][0] > self._SECONDS:
            self._points.popleft()

    def seconds_left(self, now: float, left_bytes: int) -> float | None:
        """None before three results and five seconds. The wait for the next result counts, so that the time grows."""
        since, before = self._points[0]
        if self._num_results < self._EVIDENCE_RESULTS or now - self._begin < self._EVIDENCE_SECONDS or self.done == before:
            return None
        return left_bytes * (now - since) / (self.done - before)


class Progress:
    def __init__(self, stages: Sequence[str], stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stages = tuple(stages)
        self._stream = stream or sys.stderr
        self._clock = clock
        self._number = 0
        self.timings: list[dict[str, Any]] = []

    @contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Callable[..., None]]:
        """Show a stage while it runs. Yields a function that is called with the bytes of each finished task."""
        rounds = sum(timing["name"] == name for timing in self.timings)
        self._number = max(self._number, self._stages.index(name) + 1)  # a repeated stage does not count down
        shown = f"{name}, round {rounds + 1}" if rounds else name
        title = f"[{self._number}/{len(self._stages)}] {shown:<{max(map(len, self._stages))}}"
        begin, bytes_before, ended = self._clock(), 0, threading.Event()
        pace = Pace(begin)
        bar = tqdm(
            total=max(total_bytes, 1),
            desc=title,
            unit_scale=True,
            leave=False,
            disable=not self._stream.isatty(),
            dynamic_ncols=True,
            bar_format=_BAR,
            file=self._stream,
        )

        def advance(num_bytes: int, *, already_done: bool = False) -> None:
            nonlocal bytes_before
            if already_done:
                bytes_before += num_bytes
            else:
                pace.add(self._clock(), num_bytes)
            bar.update(num_bytes)

        def show() -> None:
            while not ended.wait(_SECONDS_BETWEEN_LINES if bar.disable else _SECONDS_BETWEEN_REDRAWS):
                done = pace.done + bytes_before
                left = pace.seconds_left(self._clock(), total_bytes - done)
                time_left = f"{duration(self._clock() - begin)} so far" if left is None else f"about {duration(left)} left"
                if bar.disable:
                    print(f"{title}  {size(done)} of {size(total_bytes)}, {time_left}", file=self._stream, flush=True)
                else:
                    bar.set_postfix_str(time_left)

        ticker = threading.Thread(target=show, daemon=True)
        ticker.start()
        try:
            yield advance
        finally:
            ended.set()
            ticker.join(_SECONDS_TO_END)  # a blocked output stream must not delay the result or the error
            bar.close()
        seconds = self._clock() - begin
        timing = {"name": name, "bytes": pace.done, "bytes_done_before": bytes_before, "seconds": round(seconds, 3)}
        self.timings.append(timing)
        told = [f"{size(pace.done)} in {duration(seconds)}, {size(pace.done / max(seconds, 1e-9))}/s"]
        if bytes_before:
            told = [*(told if pace.done else []), f"{size(bytes_before)} done before"]
        print(f"{title}  {'; '.join(told)}", file=self._stream, flush=True)

    def summary(self) -> dict[str, Any]:
        """`bytes` of a stage's input are those that this run processed: files, text, or stored tokens."""
        return {"seconds": round(sum(timing["seconds"] for timing in self.timings), 3), "stages": self.timings}
