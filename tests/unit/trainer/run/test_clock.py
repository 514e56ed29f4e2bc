"""The time of training goes on over resumes, and stands still while it is paused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.run import clock
from trainer.run.clock import Clock


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    running = Clock(50.0)
    assert running.seconds == 50.0
    now[0] += 5
    assert running.lap() == 5.0
    with running.paused():
        now[0] += 100
    now[0] += 2
    assert running.lap() == 2.0
    assert running.seconds == 57.0
