"""The number format of a run with `precision = auto` is recorded, and a resume keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.settings.dotted import parse_toml
from tests.support.prepared import write_prepared
from tests.support.replays import replay_run
from tests.support.runs import losses, tiny_config
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.machine import precision


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def on_cpu(monkeypatch: pytest.MonkeyPatch, *, amx: bool) -> None:
    """Pretend that this CPU has AMX or not, and that it is faster for any width."""
    monkeypatch.setattr(precision, "has_amx", lambda: amx)
    monkeypatch.setattr(precision, "_LEAST_WIDTH", 1)


def auto(data: Path, run: Path, steps: int, **changes: Any) -> TrainConfig:
    return tiny_config(data, run, precision="auto", limits={"steps": steps}, **changes)


@pytest.mark.parametrize(("amx", "format_"), [(True, "bf16"), (False, "fp32")])
def test_a_run_with_auto_equals_one_with_its_format_and_keeps_it_on_another_cpu(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amx: bool, format_: str
) -> None:
    run = tmp_path / "auto"
    on_cpu(monkeypatch, amx=amx)
    train(auto(data, run, 5))
    record = json.loads((run / "record.json").read_text())
    assert record["precision"]["setting"] == "auto"
    assert record["precision"]["value"] == record["identity"]["precision"] == format_
    assert record["precision"]["reason"]
    assert parse_toml((run / "config.toml").read_bytes())["train"]["precision"] == format_
    on_cpu(monkeypatch, amx=not amx)
    result = train(auto(data, run, 8))
    assert json.loads((run / "record.json").read_text())["precision"] == {
        "setting": "auto",
        "value": format_,
        "reason": "the run was started with it",
    }
    assert result == train(tiny_config(data, tmp_path / "set", precision=format_, limits={"steps": 8}))
    assert losses(run) == losses(tmp_path / "set")
    assert replay_run(run, 3).difference == ""
    assert "validation" in evaluate_run(EvaluateOptions(run=run))


def test_a_run_that_was_recorded_before_auto_existed_continues_in_its_format(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "old"
    train(tiny_config(data, run, precision="fp32", limits={"steps": 5}))
    on_cpu(monkeypatch, amx=True)
    result = train(auto(data, run, 8))
    assert result == train(tiny_config(data, tmp_path / "whole", precision="fp32", limits={"steps": 8}))


def test_a_start_that_left_no_checkpoint_does_not_decide_the_format(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    on_cpu(monkeypatch, amx=False)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.loop.train_until_done", lambda run: {}["dies"])
        with pytest.raises(KeyError):
            train(auto(data, run, 5))
    assert json.loads((run / "record.json").read_text())["precision"]["value"] == "fp32"
    on_cpu(monkeypatch, amx=True)
    train(auto(data, run, 5))
    assert json.loads((run / "record.json").read_text())["precision"]["value"] == "bf16"
