"""An objective takes part in the ordinary loop through the parts that it supplies, and in nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from data_pipeline.dataset.shards import RowBatch, Rows
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, tiny_config
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.data.batch import IGNORE
from trainer.finetuning import task
from trainer.finetuning.task import LANGUAGE, Kind, Task
from trainer.loop import train
from trainer.model.decoder import Decoder, build_model
from trainer.model.forward import EvalMetrics, PassInputs
from trainer.model.loss import cross_entropy_rows, linear_cross_entropy_sum
from trainer.runs.events import MeasuresEvent
from trainer.runs.saved_run import SavedRun
from trainer.verification.audit import audit_run

SHORT = {"limits": {"steps": 4}, "checkpoint": {"every_steps": 2}, "eval": {"every_steps": 2, "sample_tokens": 4}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def chosen(monkeypatch: pytest.MonkeyPatch, objective: Task, files: Mapping[str, bytes] | None = None) -> None:
    """Make `objective` what the name `language` stands for."""
    kind = Kind(lambda _config, _manifest: files or {}, lambda _config, _files: objective)
    monkeypatch.setattr(task, "kind_named", lambda _name: kind)


def ordinary_sum(model: nn.Module, inputs: PassInputs) -> Tensor:
    assert isinstance(model, Decoder)
    hidden_BLD = model.hidden(inputs.tokens, inputs.layout)
    return linear_cross_entropy_sum(hidden_BLD, model.lm_head.weight, inputs.targets)[None]


def test_parts_that_do_what_the_loop_does_give_the_same_bits(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_line = train(tiny_config(data, tmp_path / "plain", **SHORT))
    chosen(monkeypatch, Task(model=build_model, sums=lambda _device: ordinary_sum))
    assert train(tiny_config(data, tmp_path / "own", **SHORT)) == last_line
    assert losses(tmp_path / "own") == losses(tmp_path / "plain")


class FirstTokens(Rows):
    """Rows whose only target is the parity of the first token of each document."""

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        rows = super().read(indices)
        targets_BL = np.full(rows.tokens_BL.shape, IGNORE, np.int64)
        targets_BL[:, 0] = rows.tokens_BL[:, 0] % 2
        return replace(rows, targets_BL=targets_BL)

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ones(len(indices), np.int64)


def score(model: nn.Module, inputs: PassInputs) -> Tensor:
    logits_BLV = model(inputs.tokens, inputs.layout)
    return torch.stack([cross_entropy_rows(logits_BLV, inputs.targets), logits_BLV.argmax(-1).float()], -1)


def count(facts_NK: NDArray[np.float32], targets_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.array([(facts_NK[:, :1].reshape(-1) == targets_N).sum(), len(targets_N)], np.int64)


def event(step: int, table: NDArray[np.int64]) -> MeasuresEvent:
    return MeasuresEvent(step, {"accuracy": table[0] / table[1]})


PARITY = Task(rows=FirstTokens, measures=EvalMetrics(score, count, event, lambda found: f"accuracy {found.values['accuracy']}"))


def test_an_objective_decides_about_targets_and_measures(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch, replace(PARITY, writes=False))
    run = tmp_path / "run"
    train(tiny_config(data, run, **SHORT | {"optim": {"lr": 0.03}, "limits": {"steps": 12}, "eval": {"every_steps": 6}}))
    evaluations, measured = metrics(run, "eval"), metrics(run, "measures")
    assert [one["targets"] for one in evaluations] == [9, 9, 9]
    assert [one["step"] for one in measured] == [0, 6, 12]
    assert measured[-1]["values"]["accuracy"] > measured[0]["values"]["accuracy"] == 0
    assert {
        one["tokens"] - before["tokens"] for before, one in zip(metrics(run, "train"), metrics(run, "train")[1:], strict=False)
    } == {8}
    assert not metrics(run, "sample")
    assert audit_run(run).steps == 12
    printed = json.loads(evaluate_run(EvaluateOptions(run=run, as_json=True)))
    assert printed["measures"]["values"] == measured[-1]["values"]
    assert f"accuracy {measured[-1]['values']['accuracy']}" in evaluate_run(EvaluateOptions(run=run))


def test_a_resume_writes_the_measures_of_a_step_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch, PARITY)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    last_line = train(tiny_config(data, whole, **SHORT))
    train(tiny_config(data, stopped, **SHORT | {"limits": {"steps": 2}}))
    assert train(tiny_config(data, stopped, **SHORT)) == last_line
    assert metrics(stopped, "measures") == metrics(whole, "measures")


def test_the_run_keeps_the_files_of_its_objective_and_they_belong_to_its_identity(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    chosen(monkeypatch, LANGUAGE, {"names.json": b"[1]"})
    config = tiny_config(data, run, **SHORT | {"limits": {"steps": 2}})
    train(config)
    assert (run / "objective" / "names.json").read_bytes() == b"[1]"
    assert task.saved_task(SavedRun(run), config).files == {"names.json": b"[1]"}
    assert "objective/names.json" in record_of(run)["files"]
    chosen(monkeypatch, LANGUAGE, {"names.json": b"[2]"})
    with pytest.raises(ConfigError, match=r"objective\.names\.json was sha256:"):
        train(tiny_config(data, run, **SHORT))
    (run / "objective" / "names.json").write_bytes(b"[3]")
    with pytest.raises(CheckpointError, match=r"names\.json: the file was changed"):
        task.saved_task(SavedRun(run), config)


def test_the_objective_language_adds_nothing_to_a_run(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(data, run, **SHORT | {"limits": {"steps": 2}}))
    assert not (run / "objective").exists()
    assert not [name for name in record_of(run)["identity"] if name.startswith("objective.")]
    assert task.saved_task(SavedRun(run), tiny_config(data, run)) == LANGUAGE
