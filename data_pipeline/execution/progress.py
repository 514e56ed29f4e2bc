"""Shows the current stage and its remaining time on stderr: a bar on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

    @contextlib.contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Callable[..., None]]:
        """Show a stage while it runs. Yields `_Stage.advance`."""
        rounds = sum(timing["name"] == name for timing in self.timings)
        self._number = max(self._number, self._stages.index(name) + 1)  # a repeated stage does not count down
        shown = f"{name}, round {rounds + 1}" if rounds else name
        title = f"[{self._number}/{len(self._stages)}] {shown:<{max(map(len, self._stages))}}"
        stage = _Stage(title, total_bytes, self._stream, self._clock)
        with stage.shown():
            yield stage.advance
        seconds = round(stage.seconds, 3)
        done = {"name": name, "bytes": stage.pace.done, "bytes_done_before": stage.bytes_before, "seconds": seconds}
        self.timings.append(done)
        _say(stage.last_line(), self._stream)

    def summary(self) -> dict[str, Any]:
        """`bytes` of a stage's input are those that this run processed: files, text, or stored tokens."""
        return {"seconds": round(sum(timing["seconds"] for timing in self.timings), 3), "stages": self.timings}


class _Stage:
    def __init__(self, title: str, total_bytes: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.bytes_before = 0
        self._stream = stream
        self._clock = clock
        self._begin = clock()
        self.pace = Pace(self._begin)
        self._bar = tqdm(
            total=max(total_bytes, 1),
            desc=title,
            unit_scale=True,
            leave=False,
            disable=not stream.isatty(),
            dynamic_ncols=True,
            bar_format=_BAR,
            file=stream,
        )

    @property
    def seconds(self) -> float:
        return self._clock() - self._begin

    def advance(self, num_bytes: int, *, already_done: bool = False) -> None:
        if already_done:
            self.bytes_before += num_bytes
        else:
            self.pace.add(self._clock(), num_bytes)
        self._bar.update(num_bytes)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        ended = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(ended,), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ended.set()
            ticker.join(_SECONDS_TO_END)  # a blocked output stream must not delay the result or the error
            self._bar.close()

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(_SECONDS_BETWEEN_LINES if self._bar.disable else _SECONDS_BETWEEN_REDRAWS):
            if self._bar.disable:
                _say(self.line(), self._stream)
            else:
                self._bar.set_postfix_str(self._time())

    def line(self) -> str:
        done = self.pace.done + self.bytes_before
        return f"{self.title}  {size(done)} of {size(self.total_bytes)}, {self._time()}"

    def last_line(self) -> str:
        before = f"{size(self.bytes_before)} done before"
        if self.bytes_before and not self.pace.done:
            return f"{self.title}  {before}"
        seconds = self.seconds
        line = f"{self.title}  {size(self.pace.done)} in {duration(seconds)}, {size(self.pace.done / max(seconds, 1e-9))}/s"
        return f"{line}; {before}" if self.bytes_before else line

    def _time(self) -> str:
        left = self.pace.seconds_left(self._clock(), self.total_bytes - self.bytes_before - self.pace.done)
        return f"{duration(self.seconds)} so far" if left is None else f"about {duration(left)} left"


def _say(line: str, stream: TextIO) -> None:
    print(line, file=stream, flush=True)
