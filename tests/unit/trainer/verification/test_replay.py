import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from tests.support.runs import tiny_config
from trainer.checkpoint.store import Checkpoint
from trainer.verification.replay import Replay, choose_start, first_difference, replay_config


def checkpoint(**changes: Any) -> Checkpoint:
    weights = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    parts: dict[str, Any] = {"model": weights, "optimizer": {"a/m": torch.zeros(3)}, "state": {"scaler": {}}}
    return Checkpoint(3, **parts | changes)


@given(
    saved=st.lists(st.integers(1, 40), unique=True).map(sorted),
    last=st.integers(1, 40),
    num_steps=st.integers(1, 40),
)
def test_the_newest_start_with_enough_steps_after_it_is_chosen(saved: list[int], last: int, num_steps: int) -> None:
    possible = [step for step in (0, *saved) if step + num_steps <= last]
    if possible:
        assert choose_start(saved, last, num_steps, None) == max(possible)
    else:
        with pytest.raises(ConfigError, match=f"the run has {last} steps after step 0"):
            choose_start(saved, last, num_steps, None)


def test_a_start_that_is_asked_for_is_taken_or_refused() -> None:
    assert choose_start([5, 10], 12, 2, 5) == 5
    assert choose_start([5, 10], 12, 2, 0) == 0
    with pytest.raises(ConfigError, match=r"--from 7: no checkpoint of this step; choose from 0 \(the seed\), 5, 10"):
        choose_start([5, 10], 12, 2, 7)
    with pytest.raises(ConfigError, match=r"choose from 0 \(the seed\)$"):
        choose_start([], 12, 2, 7)
    with pytest.raises(ConfigError, match="the run has 2 steps after step 10"):
        choose_start([5, 10], 12, 3, 10)
    with pytest.raises(ConfigError, match="the run has no step after step 10 to train again"):
        choose_start([5, 10], 10, 1, 10)


def test_equal_tensors_are_equal() -> None:
    assert first_difference(checkpoint(), checkpoint()) == ""


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"model": {"a": torch.arange(4.0), "b": torch.tensor([[1, 1], [1, 1.25]])}}, r"tensor model/b differs by up to 0\.25"),
        ({"model": {"a": -torch.zeros(4), "b": torch.zeros(2, 2)}}, "tensor model/a differs by up to 3"),
        ({"model": {"a": torch.arange(4.0)}}, "tensor model/b is only in the run"),
        ({"optimizer": {"a/m": torch.zeros(3), "c/m": torch.zeros(1)}}, "tensor optimizer/c/m is only in the replay"),
        ({"optimizer": {"a/m": -torch.zeros(3)}}, "tensor optimizer/a/m differs by up to 0"),
        ({"optimizer": {"a/m": torch.zeros(3, dtype=torch.float64)}}, "tensor optimizer/a/m is TensorSpec"),
        ({"average": {"a": torch.zeros(1)}}, "tensor average/a is only in the replay"),
        ({"state": {"scaler": {"scale": 2.0}}}, "the loss scaler is"),
    ],
)
def test_the_first_tensor_that_differs_is_named(changes: dict[str, Any], finding: str) -> None:
    found = first_difference(checkpoint(), checkpoint(**changes))
    assert re.search(finding, found)


def test_a_replay_has_the_settings_on_which_the_bits_depend_from_the_record(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "data", tmp_path / "run", schedule={"decay_steps": None}, limits={"epochs": 2, "minutes": 3}, threads=None
    )
    identity = {"threads": 3, "schedule.decay_steps": 15}
    again = replay_config(config, identity, tmp_path / "again", 9, ("device",))
    assert (again.run, again.threads, again.schedule.decay_steps) == (tmp_path / "again", 3, 15)
    assert again.limits.model_dump() == {"steps": 9, "epochs": None, "tokens": None, "minutes": None}
    assert again.resume.allow_changes == ("device",)
    same = ("model", "batch", "optim", "seed", "data", "eval", "alerts")
    assert all(getattr(again, name) == getattr(config, name) for name in same)


def test_nothing_but_its_last_step_ends_a_replay_and_no_service_hears_of_it(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "data",
        tmp_path / "run",
        eval={"patience": 2},
        alerts={"plateau": "stop", "disk": "stop", "throughput": "off"},
        log={"report": True, "wandb_project": "mine", "mlflow_uri": "http://here"},
    )
    again = replay_config(config, {"threads": 1, "schedule.decay_steps": 15}, tmp_path / "again", 9, ())
    assert again.eval.patience is None
    assert (again.alerts.plateau, again.alerts.disk, again.alerts.throughput) == ("log", "log", "off")
    assert (again.log.report, again.log.wandb_project, again.log.mlflow_uri) == (False, None, None)


def test_the_outcome_says_what_was_compared() -> None:
    assert "bitwise equal: 6 steps (5 to 10); every tensor at step 8" in Replay(4, 10, (8,), 1).describe()
    assert "step 5 is the first" in Replay(4, 10, (), 1, "step 5 is the first that differs").describe()
