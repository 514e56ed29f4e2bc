"""When a run ends, by each of its limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.run.limits import Pace, plan_run
from trainer.run.progress import Progress


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
