"""When a run ends, by each of its limits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.runs.limits import Pace, plan_run, with_shorter_warmup
from trainer.runs.progress import Progress


@pytest.mark.parametrize(
    ("epochs", "num_rows", "rows"), [(1.1, 350, 385), (0.07, 100, 7), (1.5, 61, 92), (2, 61, 122), (1e-9, 61, 1)]
)
def test_epochs_are_counted_as_they_were_written(tmp_path: Path, epochs: float, num_rows: int, rows: int) -> None:
    data = write_prepared(tmp_path / "data")
    schedule = {"kind": "constant", "warmup_steps": 0}
    config = tiny_config(data, tmp_path / "run", limits={"steps": None, "epochs": epochs}, schedule=schedule)
    plan = plan_run(config, read_manifest(data), num_rows)
    assert plan.rows == rows
    assert [plan.finished(Progress(rows=number)) for number in (rows - 1, rows)] == [False, True]


@pytest.mark.parametrize("ending_s", [0.0, 30.0])
def test_the_limit_on_minutes_leaves_the_time_of_the_end(tmp_path: Path, ending_s: float) -> None:
    data = write_prepared(tmp_path / "data")
    limits, schedule = {"steps": None, "minutes": 2.0}, {"kind": "wsd", "decay_steps": None}
    plan = plan_run(tiny_config(data, tmp_path / "run", limits=limits, schedule=schedule), read_manifest(data), 61)
    assert (plan.decay_steps, plan.last_step, plan.may_cool_early) == (0, None, True)
    times = (119.9 - ending_s, 120.0 - ending_s)
    assert [plan.finished(Progress(step=5, seconds=time, ending_s=ending_s)) for time in times] == [False, True]


@pytest.mark.parametrize("decay_steps", [0, 50])
def test_no_cooldown_begins_early_if_the_settings_say_where_it_ends_or_that_it_never_begins(
    tmp_path: Path, decay_steps: int
) -> None:
    data = write_prepared(tmp_path / "data")
    limits, schedule = {"steps": None, "minutes": 2.0}, {"kind": "wsd", "decay_steps": decay_steps}
    plan = plan_run(tiny_config(data, tmp_path / "run", limits=limits, schedule=schedule), read_manifest(data), 61)
    assert (plan.decay_steps, plan.may_cool_early) == (decay_steps, False)


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
    pace = Pace()
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
    pace, now = Pace(), 0.0
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
        plan = plan_run(config, manifest, 61)
        for number in range(step + 1):
            plan.pace.add(number, seconds * number / max(1, step))
        return plan.left_s(step, seconds)

    assert left(50, 100.0, steps=1000) == pytest.approx(2.0 * 950)
    assert left(50, 100.0, steps=1000, minutes=4.0) == 140.0
    assert left(50, 100.0, minutes=4.0) == 140.0
    assert left(50, 250.0, minutes=4.0) == 0.0
    assert left(1, 2.0, steps=1000) is None


def test_a_step_back_begins_a_new_measurement_of_the_pace() -> None:
    pace = Pace()
    for step in range(10):
        pace.add(step, 10.0 * step)
    assert pace.last_step_before(190.0) == 9 + 9  # 100 s at 10 s each, with 5 % to spare
    pace.add(4, 100.0)
    assert pace.last_step_before(190.0) is None


def test_the_limit_on_targets_is_near_where_the_next_step_may_reach_it(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    manifest = read_manifest(data)
    plan = plan_run(tiny_config(data, tmp_path / "run", limits={"steps": None, "tokens": 1000}), manifest, 61)
    assert [plan.may_reach_targets(Progress(targets=number), 256) for number in (743, 744, 1000)] == [False, True, True]
    unlimited = plan_run(tiny_config(data, tmp_path / "run"), manifest, 61)
    assert not unlimited.may_reach_targets(Progress(targets=10**12), 256)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(
    ("limits", "warmup_steps"),
    [
        ({"steps": 100}, 10),
        ({"steps": 9}, 0),
        ({"steps": 101}, 100),
        ({"steps": 101, "tokens": 1}, 0),
        ({"epochs": 1.0}, 6),  # 500 rows in batches of 8
        ({"minutes": 1.0, "steps": 40}, 4),
    ],
)
def test_a_warmup_that_the_run_would_end_in_becomes_a_tenth_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, limits: dict[str, Any], warmup_steps: int
) -> None:
    data = write_prepared(tmp_path / "data")
    schedule = {"kind": kind, "warmup_steps": 100, "decay_steps": None}
    config = tiny_config(data, tmp_path / "run", limits={"steps": None} | limits, schedule=schedule)
    caplog.set_level(logging.INFO)
    used = with_shorter_warmup(config, read_manifest(data), 500)
    assert used.schedule.warmup_steps == warmup_steps
    assert used == config.model_copy(update={"schedule": config.schedule.model_copy(update={"warmup_steps": warmup_steps})})
    told = f"schedule.warmup_steps is {warmup_steps} instead of 100"
    assert [told in message for message in caplog.messages] == [True] * (warmup_steps < 100)
    plan_run(used, read_manifest(data), 500)


@pytest.mark.parametrize(
    ("limits", "decay_steps"), [({"steps": 50}, 200), ({"steps": 50}, 0), ({"steps": None, "minutes": 1.0}, None)]
)
def test_a_schedule_that_does_not_end_with_the_run_keeps_its_warmup(
    tmp_path: Path, limits: dict[str, Any], decay_steps: int | None
) -> None:
    data = write_prepared(tmp_path / "data")
    schedule = {"kind": "wsd", "warmup_steps": 100, "decay_steps": decay_steps}
    config = tiny_config(data, tmp_path / "run", limits=limits, schedule=schedule)
    assert with_shorter_warmup(config, read_manifest(data), 500) is config
