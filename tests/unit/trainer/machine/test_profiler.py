"""A profile of some steps is written once, changes no bit of a run, and never ends one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.config.run import LogConfig, step_range
from trainer.loop import train
from trainer.machine.profiler import StepProfiler
from trainer.runs.layout import foreign_files

CPU = torch.device("cpu")


def make_steps(profiler: StepProfiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.before_step(step)
        torch.full((step, 7), 1.0).sum()
        profiler.after_step(step)


def trace(path: Path) -> set[str]:
    return {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}


def test_the_steps_of_the_range_are_recorded_once_and_no_others(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, "3..4", 1, CPU)
    make_steps(profiler, 1, 6)
    make_steps(profiler, 3, 4)  # after a rollback
    profiler.close()
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank-1-steps-3-4.json"
    events = json.loads(path.read_text())["traceEvents"]
    summed = {tuple(event["args"]["Input Dims"][0]) for event in events if event.get("name") == "aten::sum"}
    assert summed == {(3, 7), (4, 7)}


def test_a_run_that_ends_within_the_range_leaves_the_profile_of_its_steps(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, "3..9", 0, CPU)
    make_steps(profiler, 5, 6)  # resumed within the range
    profiler.close()
    assert "aten::sum" in trace(tmp_path / "profile/rank-0-steps-5-6.json")


def test_without_the_setting_and_before_its_steps_nothing_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps, rank in ((None, 0), ("7..9", 0), ("7..9", 1)):
        profiler = StepProfiler(tmp_path, steps, rank, CPU)
        make_steps(profiler, 1, 3)
        for _ in range(2):
            profiler.close()
    assert list(tmp_path.iterdir()) == []
    assert [one.getMessage() for one in caplog.records] == [
        "log.profile_steps = 7..9: none of these steps was trained, so there is no profile"
    ]


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "profile").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        make_steps(StepProfiler(tmp_path, "1..1", 0, CPU), 1, 1)
    assert "the profile of steps 1 to 1 was not written" in caplog.text
    assert "symbolic link" in caplog.text
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_profiled_run_has_the_same_bits_and_its_files_belong_to_it(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    plain = train(tiny_config(data, tmp_path / "plain", limits={"steps": 4}))
    assert train(tiny_config(data, tmp_path / "run", limits={"steps": 4}, log={"profile_steps": "2..3"})) == plain
    assert "aten::mm" in trace(tmp_path / "run/profile/rank-0-steps-2-3.json")
    assert not any("profile" in name for name in foreign_files(tmp_path / "run", []))


@pytest.mark.parametrize("text", ["", "10", "15..10", "0..3", "10-15", "1..101", "10..15..20", "10.. 15", "\u0661..\u0662"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        ValidationError, match=r"is not a range of 1 to 100 steps; give the first and the last step, such as 10\.\.15"
    ):
        LogConfig(profile_steps=text)


def test_a_range_has_its_first_and_last_step() -> None:
    assert step_range("10..15") == (10, 15)
    assert step_range("7..7") == (7, 7)
