"""Runs with dropout: the masks depend on seed, step and row alone, so ranks, resumes, replays and micro-batches change nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.files import sealed
from tests.support.disturbed import kill, trained
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, start_ranks, tiny_config
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.verification.replay import replay_run

SHARES = {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.1}
ELASTIC = {"reproducibility": "elastic", "batch": {"global_batch_size": 8, "micro_batch_size": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def configured(data: Path, run: Path, **changes: Any) -> TrainConfig:
    return tiny_config(data, run, **{"model": SHARES} | changes)


@pytest.fixture(scope="module")
def elastic(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[int, str]]]:
    """The last line and the losses of an elastic run on one rank."""
    run = tmp_path_factory.mktemp("runs") / "one"
    return train(configured(data, run, **ELASTIC)), losses(run)


def trained_by_ranks(config: TrainConfig, num_ranks: int) -> str:
    """Return the last line of a run on several ranks."""
    log = config.run.with_suffix(".log")
    assert start_ranks(config, num_ranks).wait(timeout=300) == 0, log.read_text()
    return [line for line in log.read_text().splitlines() if line.startswith("weights sha256:")][-1]


def test_four_ranks_and_a_resume_on_two_ranks_have_the_bits_of_one_rank(
    data: Path, tmp_path: Path, elastic: tuple[str, list[tuple[int, str]]]
) -> None:
    run = tmp_path / "run"
    trained_by_ranks(configured(data, run, **ELASTIC, limits={"steps": 5}), 4)
    assert trained_by_ranks(configured(data, run, **ELASTIC), 2) == elastic[0]
    assert losses(run) == elastic[1]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_whole_runs_on_several_ranks_have_the_bits_of_one_rank(
    data: Path, tmp_path: Path, elastic: tuple[str, list[tuple[int, str]]], num_ranks: int
) -> None:
    assert trained_by_ranks(configured(data, tmp_path / "run", **ELASTIC), num_ranks) == elastic[0]


def test_smaller_micro_batches_have_the_same_masks(data: Path, tmp_path: Path) -> None:
    """After a lack of memory a step is repeated with smaller micro-batches, and with the same numbers up to rounding."""
    found = []
    for micro in (1, 8):
        run = tmp_path / f"{micro}"
        train(configured(data, run, batch={"micro_batch_size": micro}, limits={"steps": 3}))
        found.append([event["loss"] for event in metrics(run, "train")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    train(tiny_config(data, tmp_path / "plain", batch={"micro_batch_size": 8}, limits={"steps": 3}))
    assert metrics(tmp_path / "plain", "train")[0]["loss"] != pytest.approx(found[0][0], rel=1e-5)


def test_a_resumed_run_and_a_replay_have_the_same_bits(data: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    last_line = train(configured(data, whole))
    train(configured(data, stopped, limits={"steps": 7}))
    assert train(configured(data, stopped)) == last_line
    replay = replay_run(whole, 12, train=train, start=0)
    assert replay.difference == ""
    assert replay.tensors_at == (10, 12)


@pytest.mark.parametrize("changes", [{}, ELASTIC], ids=["run", "elastic"])
def test_a_killed_run_resumes_from_its_last_save_with_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    whole, killed = (configured(data, tmp_path / name, checkpoint={"every_steps": 3}, **changes) for name in ("whole", "killed"))
    last_line = train(whole)
    with monkeypatch.context() as patch:
        kill(patch, 8)
        assert trained(killed).startswith("Killed")
    assert max(CheckpointStore(killed.run / "checkpoints").steps()) == 6
    assert train(killed) == last_line
    assert losses(killed.run) == losses(whole.run)


def test_activation_checkpointing_does_not_change_the_weights(data: Path, tmp_path: Path) -> None:
    weights = {
        mode: train(configured(data, tmp_path / mode, model=SHARES | {"activation_checkpointing": mode}, limits={"steps": 4}))
        for mode in ("none", "selective", "full")
    }
    assert len(set(weights.values())) == 1


def test_a_run_from_before_dropout_resumes_without_it_but_not_with_it(data: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    last_line = train(tiny_config(data, whole))
    train(tiny_config(data, run, limits={"steps": 5}))
    record = record_of(run)
    assert record["identity"].pop("model.residual_dropout") == 0.0
    for name in ("attention_dropout", "embedding_dropout"):
        del record["identity"][f"model.{name}"]
    (run / "record.json").write_bytes(sealed(record))
    with pytest.raises(ConfigError, match=r"model.residual_dropout was 0.0 and is 0.1"):
        train(tiny_config(data, run, model={"residual_dropout": 0.1}))
    assert train(tiny_config(data, run)) == last_line
    assert json.loads((run / "record.json").read_text())["earlier"] == []


def test_fsdp_resumes_with_the_same_bits_and_trains_like_ddp(data: Path, tmp_path: Path) -> None:
    whole, stopped, ddp = tmp_path / "whole", tmp_path / "stopped", tmp_path / "ddp"
    last_line = trained_by_ranks(configured(data, whole, parallel="fsdp"), 2)
    trained_by_ranks(configured(data, stopped, parallel="fsdp", limits={"steps": 7}), 2)
    assert trained_by_ranks(configured(data, stopped, parallel="fsdp"), 2) == last_line
    trained_by_ranks(configured(data, ddp), 2)
    sharded, replicated = ([float.fromhex(loss) for _, loss in losses(run)] for run in (whole, ddp))
    assert sharded == pytest.approx(replicated, rel=1e-4)
