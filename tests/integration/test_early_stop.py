"""Runs that end because their validation loss does not improve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.grouped import write_grouped
from tests.support.records import record_of
from tests.support.runs import metrics, tiny_config
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import train

EAGER = {"every_steps": 1, "patience": 3, "min_delta": 1.0, "sample_tokens": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grouped(tmp_path_factory.mktemp("early"))


def test_a_run_without_improvement_ends_early_with_its_reason_and_stays_ended(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", eval=EAGER, optim={"lr": 1e-9})
    digest = train(config)
    assert digest.endswith("steps 3")
    record = record_of(config.run)
    assert record["status"] == "finished"
    assert record["ended_by"].startswith("3 evaluations in a row did not improve on the validation loss")
    assert train(config) == digest
    assert len(metrics(config.run, "eval")) == 4


def test_a_run_that_goes_on_between_two_evaluations_ends_as_if_it_had_never_stopped(data: Path, tmp_path: Path) -> None:
    """The mean of the training losses since the last evaluation also equals that of the whole run."""
    patient = EAGER | {"every_steps": 4, "patience": 2, "min_delta": 3.0}
    config = tiny_config(data, tmp_path / "run", eval=patient, checkpoint={"every_steps": 1, "keep_last": 20})
    whole = train(config)
    store = CheckpointStore(config.run / "checkpoints")
    steps = store.steps()
    evaluations = store.load(steps[-1]).state["progress"]["evaluations"]
    assert [known["step"] for known in evaluations] == [0, 4, 8]
    assert None not in [known["train_loss"] for known in evaluations[1:]]
    for step in steps:
        if step > 6:
            shutil.rmtree(store.path(step))
    assert train(config) == whole
    assert store.load(steps[-1]).state["progress"]["evaluations"] == evaluations


def test_a_limit_is_named_as_what_ended_a_run(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", limits={"steps": 2}, schedule={"warmup_steps": 1, "decay_steps": 2})
    train(config)
    assert record_of(config.run)["ended_by"] == "limits.steps"
