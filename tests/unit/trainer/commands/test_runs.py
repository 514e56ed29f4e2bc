import json
import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.files import sealed, unsealed
from tests.support.prepared import write_prepared
from tests.support.runs import metrics, tiny_config
from trainer.commands.runs import RunsOptions, listed_runs
from trainer.commands.runs import run as list_runs
from trainer.loop import train
from trainer.runs.lock import locked_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two finished runs, the second in a folder of its own, and things that are no runs."""
    data = write_prepared(tmp_path / "data")
    for age, name in ((100, "first"), (50, "set/second")):
        run = tmp_path / "runs" / name
        train(tiny_config(data, run, limits={"steps": 4}))
        for file in ("record.json", "metrics.jsonl"):
            os.utime(run / file, (1_700_000_000 - age,) * 2)
    (tmp_path / "runs/empty").mkdir()
    (tmp_path / "runs/link").symlink_to(tmp_path / "runs/first")
    return tmp_path / "runs"


def test_the_run_that_changed_last_comes_first_and_links_are_not_followed(folder: Path) -> None:
    last = metrics(folder / "first", "eval")[-1]["val_loss"]
    listed = listed_runs(folder)
    assert [(run.name, run.state, run.step) for run in listed] == [("set/second", "finished", 4), ("first", "finished", 4)]
    assert listed[1].val_loss == last


def test_a_run_whose_process_is_gone_was_killed_and_one_that_is_locked_trains(folder: Path) -> None:
    path = folder / "first" / "record.json"
    record = unsealed(path.read_bytes())
    path.write_bytes(sealed(record | {"status": "training"}))
    assert listed_runs(folder / "first")[0].state == "killed"
    with locked_run(folder / "first"):
        assert listed_runs(folder / "first")[0].state == "training"
    assert listed_runs(folder / "first")[0].name == "first"


def test_a_damaged_record_does_not_hide_the_other_runs(folder: Path) -> None:
    (folder / "first/record.json").write_text("{}")
    assert sorted((run.name, run.state) for run in listed_runs(folder)) == [("first", "damaged"), ("set/second", "finished")]


def test_the_command_prints_a_table_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_runs(RunsOptions(folder=folder, as_json=False))
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["run", "set/second", "first"]
    list_runs(RunsOptions(folder=folder, as_json=True))
    assert [json.loads(line)["run"] for line in capsys.readouterr().out.splitlines()] == ["set/second", "first"]


def test_a_folder_without_runs_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run; `trainer train"):
        list_runs(RunsOptions(folder=tmp_path))
    with pytest.raises(ConfigError, match="is not a folder"):
        list_runs(RunsOptions(folder=tmp_path / "missing"))
