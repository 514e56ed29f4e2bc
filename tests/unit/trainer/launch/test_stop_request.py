"""The first stop signal ends pauses and is passed on to the child, once."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.signal_handlers import installed_request
from tests.support.terminals import screen_of, terminal_as
from trainer.launch import stop_request as module
from trainer.launch.stop_request import STOP_SIGNALS, StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with installed_request() as stop:
        yield stop


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Prints a line for each SIGTERM, and ends once its input does."""
    does = "trap 'echo got' TERM; echo up; while ! read -r -t 0.05; do [ $? -gt 128 ] || exit 0; done"
    with subprocess.Popen(["bash", "-c", does], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def printed(child: subprocess.Popen[str]) -> str:
    """What the child has printed since it was up, at its end."""
    time.sleep(0.2)
    return child.communicate()[0]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_reaches_the_child_once_whatever_follows(
    stop: StopRequest, child: subprocess.Popen[str], number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with stop.passed_on_to(child.pid, saves=True):
        assert not stop.is_received()
        signal.raise_signal(number)
        assert stop.is_received()
        signal.raise_signal(signal.SIGTERM)
        assert printed(child) == "got\n"
    assert capfd.readouterr().err == f"train: {number.name} received; stopping, after a save if a step was trained\n"


def test_a_signal_before_there_is_a_child_is_passed_on_to_it(
    stop: StopRequest, child: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == "train: SIGTERM received; nothing is started any more\n"
    with stop.passed_on_to(child.pid, saves=True):
        assert printed(child) == "got\n"


def test_a_signal_at_the_moment_when_the_child_becomes_known_is_passed_on_once(
    stop: StopRequest, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_on, signals = stop._pass_on, [signal.SIGTERM]

    def pass_on_after_a_signal() -> None:
        if signals:
            signal.raise_signal(signals.pop())
        pass_on()

    monkeypatch.setattr(stop, "_pass_on", pass_on_after_a_signal)
    with stop.passed_on_to(child.pid):
        assert printed(child) == "got\n"


def test_a_child_that_has_ended_gets_nothing(stop: StopRequest, child: subprocess.Popen[str]) -> None:
    with stop.passed_on_to(child.pid):
        pass
    signal.raise_signal(signal.SIGTERM)
    assert printed(child) == ""


def test_a_pause_ends_with_the_request_and_every_later_pause_at_once(stop: StopRequest) -> None:
    begun = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    stop.pause(60)
    stop.pause(60)
    assert 0.1 < time.monotonic() - begun < 30


def test_a_signal_that_comes_just_before_the_wait_ends_it(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has not run its handler yet when the system call begins."""
    select_now, waits = select.select, []

    def select_after_a_signal(*arguments: Any) -> Any:
        if not waits:
            signal.raise_signal(signal.SIGCHLD)
        waits.append(arguments)
        return select_now(*arguments)

    monkeypatch.setattr(select, "select", select_after_a_signal)
    begun = time.monotonic()
    stop.wait_for_signal(60)
    assert time.monotonic() - begun < 30
    assert len(waits) == 1


def test_a_pause_without_a_request_takes_its_time_whatever_becomes_of_children(stop: StopRequest) -> None:
    begun = time.monotonic()
    signal.raise_signal(signal.SIGCHLD)
    stop.pause(0.3)
    assert time.monotonic() - begun >= 0.3


def test_a_request_is_kept_where_nobody_reads_what_is_said(stop: StopRequest) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    assert stop.is_received()


@contextmanager
def said_to(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_STDERR", descriptor)
        yield


def test_a_line_replaces_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_as("stderr") as shown:
        os.write(sys.stderr.fileno(), b"50%|#####     | 5/10 [00:01<00:01]")
        with said_to(sys.stderr.fileno(), monkeypatch):
            module.log_line("stopping")
        assert screen_of(shown()) == ["train: stopping", ""]


def test_a_pipe_receives_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with said_to(writer, monkeypatch):
        module.log_line("stop\x1b[2Jping")
    os.close(writer)
    assert os.read(reader, 1000) == "train: stop⟨U+001B⟩[2Jping\n".encode()
    os.close(reader)
