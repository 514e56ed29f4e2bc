"""The state of a checkpoint besides its tensors comes back as it was, and a state that no run writes is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.config import GuardConfig
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.runs.metrics_file import CutOff
from trainer.runs.state import LedgerHead, Progress, RunState


def state() -> RunState:
    guard, losses = Guard(GuardConfig()), LossMean()
    for step in range(1, 4):
        guard.judge(step, 3.0 / step, 1.0)
        losses.add(3.0 / step)
    progress = Progress(step=3, rows=24, targets=700, evaluated_step=2, left_out=((8, 16),)).after_evaluation(2.5, 3.1)
    return RunState(progress, {"scale": 65536.0}, guard.state, losses.state, LedgerHead(3, 4, "ab" * 32))


def test_it_survives_json() -> None:
    before = state()
    assert RunState.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_it_knows_whether_its_step_was_evaluated() -> None:
    assert state().known == CutOff(3, evaluated=True, rollbacks=0)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("progress", "rows"), -1),
        (("progress", "evaluations"), [{"step": 1}]),
        (("guard", "steps"), [1]),
        (("guard", "rollbacks"), "none"),
        (("guard", "tail"), {"steps": ["a"], "excesses": [0.0], "climbs": [0.0], "noises": [0.0]}),
        (("guard", "tail"), {"steps": [1], "excesses": [], "climbs": [0.0], "noises": [0.0]}),
        (("train_losses", "total"), None),
        (("ledger", "lines"), 1.5),
        (("scaler", "scale"), -1.0),
    ],
)
def test_a_value_that_no_run_writes_is_named(place: tuple[str, str], value: Any) -> None:
    values = json.loads(json.dumps(state().to_json()))
    values[place[0]][place[1]] = value
    with pytest.raises(ValueError, match=place[0]):
        RunState.from_json(values)
