"""When a run ends, by each of its limits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.runs.limits import plan_run, with_shorter_warmup
from trainer.runs.state import Progress


@pytest.mark.parametrize(
    ("epochs", "num_rows", "rows"), [(1.1, 350, 385), (0.07, 100, 7), (1.5, 61, 92), (2, 61, 122), (1e-9, 61, 1)]
)
def test_epochs_are_counted_as_they_were_written(tmp_path: Path, epochs: float, num_rows: int, rows: int) -> None:
    data = write_prepared(tmp_path / "data")
    schedule = {"kind": "constant", "warmup_steps": 0}
    config = tiny_config(data, tmp_path / "run", limits={"steps": None, "epochs": epochs}, schedule=schedule)
    plan = plan_run(config, read_manifest(data), num_rows)
    assert plan.rows == rows
    assert [plan.ended_by(Progress(rows=number)) for number in (rows - 1, rows)] == [None, "limits.epochs"]


@pytest.mark.parametrize("ending_s", [0.0, 30.0])
def test_the_limit_on_minutes_leaves_the_time_of_the_end(tmp_path: Path, ending_s: float) -> None:
    data = write_prepared(tmp_path / "data")
    limits, schedule = {"steps": None, "minutes": 2.0}, {"kind": "wsd", "decay_steps": None}
    plan = plan_run(tiny_config(data, tmp_path / "run", limits=limits, schedule=schedule), read_manifest(data), 61)
    assert (plan.decay_steps, plan.certain_step, plan.may_cool_early) == (0, None, True)
    times = (119.9 - ending_s, 120.0 - ending_s)
    assert [plan.ended_by(Progress(step=5, seconds=time, ending_s=ending_s)) for time in times] == [None, "limits.minutes"]


@pytest.mark.parametrize("decay_steps", [0, 50])
def test_no_cooldown_begins_early_if_the_settings_say_where_it_ends_or_that_it_never_begins(
    tmp_path: Path, decay_steps: int
) -> None:
    data = write_prepared(tmp_path / "data")
    limits, schedule = {"steps": None, "minutes": 2.0}, {"kind": "wsd", "decay_steps": decay_steps}
    plan = plan_run(tiny_config(data, tmp_path / "run", limits=limits, schedule=schedule), read_manifest(data), 61)
    assert (plan.decay_steps, plan.may_cool_early) == (decay_steps, False)


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
