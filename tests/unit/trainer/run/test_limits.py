"""When a run ends, by each of its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.dataset.manifest import read_manifest
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.run.limits import plan_run
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


def test_the_limit_on_targets_is_near_where_the_next_step_may_reach_it(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    manifest = read_manifest(data)
    plan = plan_run(tiny_config(data, tmp_path / "run", limits={"steps": None, "tokens": 1000}), manifest, 61)
    assert [plan.may_reach_targets(Progress(targets=number), 256) for number in (743, 744, 1000)] == [False, True, True]
    unlimited = plan_run(tiny_config(data, tmp_path / "run"), manifest, 61)
    assert not unlimited.may_reach_targets(Progress(targets=10**12), 256)
