"""A run that is shorter than the warm-up of its settings."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import metrics, tiny_config
from trainer.launch.finished import finished_as
from trainer.loop import train


def test_a_run_shorter_than_its_warmup_uses_and_records_a_shorter_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, run = write_prepared(tmp_path / "data"), tmp_path / "run"
    config = tiny_config(data, run, limits={"steps": 10}, schedule={"warmup_steps": 100, "decay_steps": None})
    caplog.set_level(logging.INFO)
    result = train(config)
    assert "schedule.warmup_steps is 1 instead of 100: the run has 10 steps" in caplog.text
    assert tomllib.loads((run / "config.toml").read_text())["train"]["schedule"]["warmup_steps"] == 1
    rates = [event["lr"] for event in metrics(run, "train")]
    assert max(rates) == rates[1] == config.optim.lr
    assert "time        about" in caplog.text
    assert train(config) == result, "the same command resumes the run"
    assert finished_as(config) is not None
    assert finished_as(config.model_copy(update={"seed": 1})) is None
