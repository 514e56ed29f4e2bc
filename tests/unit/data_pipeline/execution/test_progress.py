import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.execution import progress as module
from data_pipeline.execution.progress import Pace, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_no_time_is_left_to_tell_before_there_is_evidence() -> None:
    pace = Pace(0.0)
    for now in (1.0, 2.0, 3.0):
        assert pace.seconds_left(now, 1000) is None, "fewer than three results"
        pace.add(now, 100)
    assert pace.seconds_left(4.9, 1000) is None, "less than five seconds"
    assert pace.seconds_left(6.0, 1000) == 1000 / (300 / 6)


@given(st.floats(0.1, 1e3), st.integers(1, 10**9), st.integers(60, 200))
def test_at_a_steady_speed_the_time_left_is_exact(seconds: float, num_bytes: int, results: int) -> None:
    pace = Pace(50.0)
    for number in range(1, results + 1):
        pace.add(50.0 + number * seconds, num_bytes)
    left = pace.seconds_left(50.0 + results * seconds, 7 * num_bytes)
    assert left == pytest.approx(7 * seconds) or (left is None and results * seconds < 5)


def test_the_speed_is_that_of_the_last_minute_and_a_standstill_makes_the_time_left_grow() -> None:
    pace = Pace(0.0)
    for second in range(1, 101):
        pace.add(float(second), 1000)
    for second in range(101, 201):
        pace.add(float(second), 10)
    slow = pace.seconds_left(200.0, 1000)
    assert slow == pytest.approx(100, rel=0.05)
    assert pace.seconds_left(260.0, 1000) == pytest.approx(200, rel=0.05)


def test_a_stage_that_starts_again_is_timed_by_what_it_does_now() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(("read", "tokenize"), stream, clock)
    with progress.stage("tokenize", 50_000_000) as advance:
        advance(40_000_000, already_done=True)
        clock.now += 4.0
        advance(10_000_000)
    assert stream.getvalue() == "[2/2] tokenize  10.0 MB in 4.0 s, 2.5 MB/s; 40.0 MB done before\n"
    assert progress.summary() == {
        "seconds": 4.0,
        "stages": [{"name": "tokenize", "bytes": 10_000_000, "bytes_done_before": 40_000_000, "seconds": 4.0}],
    }


def test_a_stage_with_nothing_left_to_do_says_so() -> None:
    stream = io.StringIO()
    with Progress(("read", "tokenize"), stream, Clock()).stage("read", 300) as advance:
        advance(300, already_done=True)
    assert stream.getvalue() == "[1/2] read      300 bytes done before\n"


def test_where_there_is_no_terminal_a_line_comes_at_times_even_when_no_result_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.001)
    said = threading.Event()
    lines = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            lines.append(text)
            if "left" in text:
                said.set()
            return len(text)

    clock = Clock()
    with Progress(("train",), Stream(), clock).stage("train", 10_000) as advance:
        clock.now += 130
        while "[1/1] train  0 bytes of 10.0 kB, 2 min 10 s so far" not in lines:  # a line before the clock moved has another time
            said.wait(0.001)
        for _ in range(3):
            advance(1000)
        assert said.wait(30), "the time left is told once three results are there"
    assert "[1/1] train  3.0 kB of 10.0 kB, about 5 min 03 s left" in lines


def test_on_a_terminal_there_is_a_bar_with_the_time_and_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_REDRAWS", 0.001)
    stream, clock = Terminal(), Clock()
    with Progress(("read",), stream, clock).stage("read", 4000) as advance:
        for _ in range(3):
            clock.now += 10
            advance(1000)
        while "about 10 s left" not in stream.getvalue():
            threading.Event().wait(0.001)
    shown = stream.getvalue()
    assert "[1/1] read  75%|" in shown
    assert "3.00kB/4.00kB" in shown
    assert shown.split("\r")[-1] == "[1/1] read  3.0 kB in 30 s, 100 bytes/s\n"


def test_a_stage_that_is_stopped_is_neither_timed_nor_called_done() -> None:
    stream, threads = io.StringIO(), threading.enumerate()
    progress = Progress(("read",), stream, Clock())
    with pytest.raises(KeyboardInterrupt), progress.stage("read", 4000):
        raise KeyboardInterrupt
    assert (progress.timings, stream.getvalue()) == ([], "")
    assert not set(threading.enumerate()).difference(threads), "the thread that shows it has ended"


def test_an_empty_stage_is_shown_without_a_fault() -> None:
    stream = Terminal()
    with Progress(("sample",), stream, Clock()).stage("sample", 0):
        pass
    assert stream.getvalue().endswith("[1/1] sample  0 bytes in 0.0 s, 0 bytes/s\n")


def test_the_count_of_stages_never_goes_back_and_rounds_are_named() -> None:
    stream = io.StringIO()
    progress = Progress(("read", "find pairs", "resolve pairs", "mark"), stream, Clock())
    for name in ("read", "find pairs", "resolve pairs", "find pairs", "resolve pairs", "mark"):
        with progress.stage(name, 10):
            pass
    titles = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert [title[:5] for title in titles] == ["[1/4]", "[2/4]", "[3/4]", "[3/4]", "[3/4]", "[4/4]"]
    assert titles[3:5] == ["[3/4] find pairs, round 2", "[3/4] resolve pairs, round 2"]
    assert [timing["name"] for timing in progress.timings].count("find pairs") == 2


def test_a_stream_that_takes_no_more_text_does_not_hold_a_stage_back(monkeypatch: pytest.MonkeyPatch) -> None:
    writing, may_write = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            if threading.current_thread() is not threading.main_thread():
                writing.set()
                may_write.wait()
            return len(text)

    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(module, "_SECONDS_TO_END", 0.01)
    with Progress(["read"], Stuck()).stage("read", 100):
        assert writing.wait(60)
    assert not may_write.is_set()
    may_write.set()
