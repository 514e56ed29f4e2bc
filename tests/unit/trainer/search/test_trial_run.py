"""The evaluations in the metrics of a run that may be in progress, and the recipe of a trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import CheckpointError
from common.settings.load import load_settings
from common.settings.options import help_parser
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.runs.events import EvalEvent, TrainEvent
from trainer.runs.lock import locked_run
from trainer.search.study import Trial
from trainer.search.trial_run import TrialRun, drop_checkpoints, read_progress, recipe_of


def line(event: EvalEvent | TrainEvent) -> str:
    return json.dumps(event.to_json()) + "\n"


def train(step: int) -> str:
    event = TrainEvent(step=step, loss=2.0, grad_norm=1.0, learning_rate=0.1, targets=1, tokens_per_s=None, loader_wait_s=None)
    return line(event)


def test_evaluations_are_read_up_to_a_line_that_is_not_complete(tmp_path: Path) -> None:
    assert read_progress(tmp_path).losses == {}
    text = train(1) + line(EvalEvent(1, 3.5, 10)) + train(2) + train(3) + line(EvalEvent(3, 3.25, 10)) + train(4)[:-9]
    (tmp_path / "metrics.jsonl").write_text(text)
    progress = read_progress(tmp_path)
    assert (progress.losses, progress.step) == ({1: 3.5, 3: 3.25}, 3)


def test_metrics_that_are_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        read_progress(tmp_path)


def test_the_recipe_of_a_trial_gives_its_settings_again(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", tmp_path / "run", optim={"lr": 0.1 + 0.2}, mixture={"weights": {"a": 1 / 3}})
    (tmp_path / "r.toml").write_text(recipe_of(config))
    words = ["--recipe", str(tmp_path / "r.toml"), "--run", str(config.run)]
    again = load_settings(TrainConfig, words, help_parser(TrainConfig, "", ""), {})
    assert again == config.model_copy(update={"recipe": str(tmp_path / "r.toml")})


def test_the_last_error_of_the_output_is_the_reason(tmp_path: Path) -> None:
    run = TrialRun(tmp_path, Trial(number=1, values={}), tiny_config(tmp_path / "data", tmp_path / "run"))
    assert run.last_error() == ""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trial-0001.log").write_text("error: the first\nstep 2\nerror: model.context is too short\nmore\n")
    assert run.last_error() == "model.context is too short"


def test_checkpoints_are_removed_but_no_other_file_no_target_of_a_link_and_not_while_the_run_is_trained(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run / "checkpoints", elsewhere / "checkpoints"):
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (run / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to(elsewhere)
    drop_checkpoints(tmp_path / "link")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/checkpoints").symlink_to(elsewhere / "checkpoints")
    drop_checkpoints(tmp_path / "linked")
    assert (elsewhere / "checkpoints/manifest.json").exists()
    with locked_run(run):
        drop_checkpoints(run)
    assert (run / "checkpoints/manifest.json").exists()
    drop_checkpoints(run)
    drop_checkpoints(run)
    assert sorted(path.name for path in run.iterdir()) == [".lock", "metrics.jsonl"]
    drop_checkpoints(tmp_path / "none")
    assert not (tmp_path / "none").exists()
