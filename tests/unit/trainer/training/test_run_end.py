"""When a run ends at its speed so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.runs.limits import plan_run
from trainer.training.run_end import RunEnd, StepTimes


@given(
    seconds_each=st.floats(1e-3, 1e3),
    num_steps=st.integers(2, 50),
    start=st.integers(0, 1000),
    before_s=st.floats(0, 1e5),
    remaining_s=st.floats(0, 1e6),
)
def test_the_steps_that_the_pace_foresees_end_before_the_deadline(
    seconds_each: float, num_steps: int, start: int, before_s: float, remaining_s: float
) -> None:
    pace = StepTimes()
    for number in range(3):  # steps that compile code do not count
        pace.add(start + number, before_s * number / 3)
        assert pace.last_step_before(1e9) is None
    for number in range(num_steps):
        pace.add(start + 3 + number, before_s + number * seconds_each)
    now_s = before_s + (num_steps - 1) * seconds_each
    last = pace.last_step_before(now_s + remaining_s)
    assert last is not None
    more = last - (start + 2 + num_steps)
    assert 0 <= more * seconds_each <= remaining_s
    assert (more + 1) * seconds_each > remaining_s * 0.949 - 1e-6


def test_the_pace_is_that_of_the_last_minute_without_evaluations() -> None:
    pace, now = StepTimes(), 0.0
    for step in range(100):
        pace.add(step, now)
        now += 2.0
    assert pace.seconds_each == pytest.approx(2.0)
    for step in range(100, 1400):  # 20 times as fast, for two minutes
        pace.add(step, now)
        now += 0.1 + (20.0 if step % 500 == 0 else 0.0)
    assert pace.seconds_each == pytest.approx(0.1, rel=0.05)


def test_the_time_that_is_left_is_that_to_the_first_limit(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    manifest = read_manifest(data)

    def left(step: int, seconds: float, **limits: float | None) -> float | None:
        config = tiny_config(data, tmp_path / "run", limits={"steps": None, **limits}, schedule={"kind": "constant"})
        end = RunEnd(plan_run(config, manifest, 61), config.schedule, 0, cast(Any, None), None)
        for number in range(step + 1):
            end.times.add(number, seconds * number / max(1, step))
        return end.left_s(step, seconds)

    assert left(50, 100.0, steps=1000) == pytest.approx(2.0 * 950)
    assert left(50, 100.0, steps=1000, minutes=4.0) == 140.0
    assert left(50, 100.0, minutes=4.0) == 140.0
    assert left(50, 250.0, minutes=4.0) == 0.0
    assert left(1, 2.0, steps=1000) is None


def test_a_step_back_begins_a_new_measurement_of_the_pace() -> None:
    pace = StepTimes()
    for step in range(10):
        pace.add(step, 10.0 * step)
    assert pace.last_step_before(190.0) == 9 + 9  # 100 s at 10 s each, with 5 % to spare
    pace.add(4, 100.0)
    assert pace.last_step_before(190.0) is None
