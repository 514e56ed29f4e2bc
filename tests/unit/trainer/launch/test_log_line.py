"""A line of the launcher is whole: beside the bar of rank 0 on a terminal, and plain elsewhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.terminals import screen_of, terminal_as
from trainer.launch import stop_request as module


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
