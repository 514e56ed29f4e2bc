"""A request to stop is heard whenever it comes: also while it was blocked, and not any more when it is too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.launch.stop_request import stop_signal

ROOT = Path(__file__).resolve().parents[4]
BORN_WITH_IT_BLOCKED = """
import os, signal, sys, threading
from trainer.launch.stop_request import stop_signal
number = signal.Signals[sys.argv[1]]
signal.pthread_sigmask(signal.SIG_BLOCK, {number})
os.kill(os.getpid(), number)
print("alive")
with stop_signal() as request:
    print(request.name)
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # a thread that does not block it
os.kill(os.getpid(), number)
print("finished")
"""


def test_the_first_signal_is_noted_and_later_ones_change_nothing() -> None:
    with stop_signal() as request:
        assert request.name is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.name == "SIGINT"


def test_afterwards_handlers_and_mask_are_those_of_before() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with stop_signal():
        assert signal.getsignal(signal.SIGTERM) != handlers[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_rank_that_is_born_with_it_blocked_hears_what_came_before_and_ignores_what_comes_after(name: str) -> None:
    command = [sys.executable, "-c", BORN_WITH_IT_BLOCKED, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["alive", name, "finished"]), done.stderr
