"""The time of a run goes on over resumes, and also in a pause, which belongs to no step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.runs import clock
from trainer.runs.clock import Clock


def test_a_pause_counts_as_time_of_the_run_and_not_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    running = Clock()
    now[0] += 3
    running.resume(50.0)
    assert running.seconds == 53.0
    now[0] += 5
    assert running.lap() == 5.0
    with running.paused():
        now[0] += 100
    now[0] += 2
    assert running.lap() == 2.0
    assert running.seconds == 160.0


def test_the_end_is_expected_to_take_two_steps_and_the_longest_recent_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    running = Clock()
    assert running.ending_s == 0.0
    for seconds in (40.0, *range(1, 10)):
        with running.evaluating_and_saving():
            now[0] += seconds
    with running.paused():
        now[0] += 500
    assert running.ending_s == 40.0
    with running.evaluating_and_saving():
        now[0] += 1
    assert running.ending_s == 9.0
    for seconds in (600.0, 600.0, 600.0, 3.0, 2.0, 80.0):  # the first steps compile code
        now[0] += seconds
        running.lap()
    assert running.ending_s == 2 * 3.0 + 9.0


def test_a_resumed_run_expects_at_least_as_long_an_end_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 7.0))
    running = Clock()
    running.resume(50.0, 12.5)
    with running.evaluating_and_saving():
        pass
    assert running.ending_s == 12.5
