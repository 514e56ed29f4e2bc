"""Lines, colours and bars: on a terminal they never mix and never exceed its width; a pipe receives plain lines."""

from __future__ import annotations

import fcntl
import io
import logging
import struct
import sys
import termios

import pytest
from tqdm import tqdm

from common.terminal import LineHandler, coloured, progress_shown, write_line
from tests.support.terminals import screen_of, terminal_as

LONG = " ".join(f"word{number}" for number in range(40))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def resize(columns: int) -> None:
    fcntl.ioctl(sys.stderr.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_lines_beside_a_bar_are_whole_and_the_bar_is_below_them(columns: int) -> None:
    handler = LineHandler(sys.stderr)
    with terminal_as("stderr") as shown:
        resize(columns)
        handler.setStream(sys.stderr)
        with tqdm(total=10, file=sys.stderr, dynamic_ncols=True, mininterval=0) as bar:
            for number in range(3):
                bar.update()
                write_line(f"line {number}", sys.stderr)
                handler.emit(logging.makeLogRecord({"msg": f"warning {number}", "levelno": logging.WARNING}))
            write_line(LONG, sys.stderr)
            bar.update()
            *lines, last = [line for line in screen_of(shown(), columns) if line]
    assert lines[:6] == [f"{kind} {number}" for number in range(3) for kind in ("line", "warning")]
    assert " ".join(lines[6:]).split() == LONG.split()
    assert "4/10" in last
    assert all(len(line) <= columns for line in (*lines, last))


def test_only_a_terminal_gets_colours_and_none_if_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_as("stderr") as shown:
        write_line("bad", sys.stderr, "red")
        assert "\x1b[31mbad\x1b[0m" in shown()
        for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert coloured("bad", "red", sys.stderr) == "bad"
    assert coloured("bad", "red", io.StringIO()) == "bad"


def test_a_pipe_receives_each_line_as_it_is() -> None:
    pipe = io.StringIO()
    write_line(LONG, pipe, "red")
    with progress_shown("work", 3, pipe, quiet_s=0) as advance:
        advance()
    assert pipe.getvalue() == f"{LONG}\n"


def test_long_work_shows_a_bar_that_disappears_and_short_work_shows_none() -> None:
    for quiet_s, expected in ((0.0, True), (1e6, False)):
        with terminal_as("stderr") as shown:
            with progress_shown("reading", 4, sys.stderr, quiet_s=quiet_s) as advance:
                for _ in range(4):
                    advance()
            written = shown()
        assert ("reading" in written) == expected
        assert screen_of(written) == [""]


def test_a_message_is_shown_even_if_the_package_for_bars_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with terminal_as("stderr") as shown:
        write_line("a module is missing", sys.stderr)
        assert shown().strip() == "a module is missing"


def test_paragraphs_keep_their_line_breaks_and_indents() -> None:
    with terminal_as("stderr") as shown:
        resize(40)
        write_line(f"step 1:\n    def f():\n        {LONG[:60]}\n\nend", sys.stderr)
        lines = screen_of(shown(), 40)
    assert lines[:2] == ["step 1:", "    def f():"]
    assert all(line.startswith("        ") for line in lines[2:4])
    assert lines[-3:] == ["", "end", ""]
