"""Whole training runs with optional features: mixtures, averages, other optimizers and losses, sharded weights, late results."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, ExitCode
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from tests.support.prepared import write_prepared
from tests.support.ranks import run_ranks
from tests.support.runs import losses, metrics, start_ranks, tiny_config
from trainer import loop
from trainer.checkpoint.of_run import load_checkpoint
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.loader import global_batch
from trainer.data.order import UniformOrder
from trainer.distributed.group import Group
from trainer.extensions.hooks import Extension
from trainer.loop import train
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule
from trainer.optim.optimizers import build_optimizers
from trainer.parallel.wrapping import wrap_for_training
from trainer.runs.saved_run import SavedRun
from trainer.training.step import StepInputs, StepResults, train_step
from trainer.training.trainable import Trainable, make_scaler


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The last line and the folder of a run without a feature."""
    run = tmp_path_factory.mktemp("plain") / "run"
    return train(tiny_config(data, run)), run


FEATURES: dict[str, dict[str, Any]] = {
    "muon": {"optim": {"kind": "muon"}},
    "an average of the weights": {"ema": {"decay": 0.9, "warmup_steps": 3}},
    "a mixture": {"mixture": {"weights": {"a": 3, "b": 1}}},
    "documents weighed alike": {"loss": {"reduction": "sequences"}},
    "every option of the loss": {"loss": {"label_smoothing": 0.1, "z_loss": 1e-4, "temperature": 1.5, "chunk_tokens": 7}},
    "selective checkpointing": {"model": {"activation_checkpointing": "selective"}},
    "wsd": {"schedule": {"kind": "wsd"}},
    "elastic": {"reproducibility": "elastic"},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_it_learns_and_goes_on_exactly_after_a_stop(feature: str, data: Path, plain: tuple[str, Path], tmp_path: Path) -> None:
    changes = FEATURES[feature]
    whole = train(tiny_config(data, tmp_path / "whole", **changes))
    train(tiny_config(data, tmp_path / "resumed", **changes, limits={"steps": 7}))
    assert train(tiny_config(data, tmp_path / "resumed", **changes)) == whole
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    first, *_, last = metrics(tmp_path / "whole", "eval")
    assert last["val_loss"] < first["val_loss"] - 0.3
    without_effect = feature in ("an average of the weights", "selective checkpointing")
    assert (whole == plain[0]) == without_effect


def test_the_average_is_what_is_evaluated(data: Path, plain: tuple[str, Path], tmp_path: Path) -> None:
    train(tiny_config(data, tmp_path / "averaged", ema={"decay": 0.9}))
    without, averaged = (metrics(run, "eval")[-1]["val_loss_hex"] for run in (plain[1], tmp_path / "averaged"))
    assert without != averaged
    again = json.loads(evaluate_run(EvaluateOptions(run=tmp_path / "averaged", as_json=True)))
    assert float(again["val_loss"]).hex() == averaged


def test_results_that_are_read_a_step_late_are_the_same(
    data: Path, plain: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the host does not wait for the step that it has just started."""
    at_once, run = plain
    monkeypatch.setattr(loop, "StepResults", lambda lag: StepResults(lag + 1))
    late = train(tiny_config(data, tmp_path / "late"))
    assert late == at_once
    assert losses(tmp_path / "late") == losses(run)
    assert metrics(tmp_path / "late", "eval") == metrics(run, "eval")


def test_automatic_micro_batches_are_tried_recorded_and_kept(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    run = tmp_path / "auto"
    by_hand = train(tiny_config(data, tmp_path / "by-hand", batch={"micro_batch_size": 8}))
    train(tiny_config(data, run, batch={"micro_batch_size": "auto"}, limits={"steps": 5}))
    assert "batch.micro_batch_size = auto: 8 rows; memory estimate" in caplog.text
    assert "measured peak" in caplog.text
    monkeypatch.setattr("trainer.training.micro_batch_size.probe", lambda *_: 4)  # a resume must not probe again
    assert train(tiny_config(data, run, batch={"micro_batch_size": "auto"})) == by_hand


def test_settings_that_exclude_each_other_are_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"mixture": {"weights": {"c": 1}}}, r"c.*a, b"),
        ({"attention": "varlen"}, "varlen"),
        ({"precision": "float8"}, "float8"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(tiny_config(data, tmp_path / "run", **changes))
        assert not (tmp_path / "run" / "checkpoints").exists()


def gradients_of_a_batch(group: Group, data: Path, reproducibility: str) -> tuple[str, list[bytes]]:
    """Return loss and gradients of one global batch of 16 micro-batches, distributed over the ranks."""
    config = tiny_config(
        data,
        Path("run"),
        batch={"global_batch_size": 16, "micro_batch_size": 1},
        optim={"clip_norm": 1e6},
        reproducibility=reproducibility,
    )
    manifest = read_manifest(data)
    rows = Rows(data, manifest, "train")
    model = build_model(config.model, manifest.vocab_size, seed=3)
    loss = LossModule(model, config.loss)
    context = RunContext(config, manifest, group, "sdpa")
    module, accumulation = wrap_for_training(loss, context)
    optimizers = build_optimizers(model, config.optim)
    trainable = Trainable(context, Extension(), loss, module, accumulation, make_scaler(context), optimizers)
    batch = global_batch(rows, UniformOrder(5, len(rows)), config.batch, group, 0)
    result = train_step(trainable, batch, StepInputs(1)).result()
    return result.loss.hex(), [torch.as_tensor(parameter.grad).numpy().tobytes() for parameter in trainable.parameters.values()]


@pytest.mark.parametrize("reproducibility", ["elastic", "run"])
def test_ranks_times_accumulation_gives_one_gradient(reproducibility: str, data: Path) -> None:
    """1 rank with 16 micro-batches, 4 with 4 each, 16 with 1 each. Bit for bit under `elastic`, else up to rounding."""
    results = [run_ranks(gradients_of_a_batch, ranks, data, reproducibility, timeout_s=300) for ranks in (1, 4, 16)]
    [(loss, gradients)] = results[0]
    everyone = [result for of_ranks in results for result in of_ranks]
    assert {found for found, _ in everyone} == {loss}
    if reproducibility == "elastic":
        assert all(found == gradients for _, found in everyone)
    else:
        assert any(found != gradients for _, found in everyone)
        for _, found in everyone:
            for one, other in zip(found, gradients, strict=True):
                torch.testing.assert_close(as_tensor(one), as_tensor(other), rtol=1e-4, atol=1e-6)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def on_two_ranks(config: TrainConfig) -> None:
    assert start_ranks(config, 2).wait(timeout=300) == ExitCode.DONE, config.run.with_suffix(".log").read_text()


# The products of Muon are in bf16, which rounds a small difference of a gradient up.
@pytest.mark.parametrize(("kind", "tolerance"), [("adamw", 1e-6), ("muon", 1e-4)])
def test_sharded_weights_train_alike_and_checkpoints_of_either_load_in_the_other(
    kind: str, tolerance: float, data: Path, tmp_path: Path
) -> None:
    """Two ranks, with the first half under one method and the second half under the other, compared with one method throughout."""
    allowed = {"resume": {"allow_changes": ("parallel",)}}
    for first in ("ddp", "fsdp"):
        on_two_ranks(tiny_config(data, tmp_path / first, parallel=first, optim={"kind": kind}, limits={"steps": 6}))
    for run, first, second in (("mixed", "fsdp", "ddp"), ("mixed-2", "ddp", "fsdp")):
        shutil.copytree(tmp_path / first, tmp_path / run)
        on_two_ranks(tiny_config(data, tmp_path / run, parallel=second, optim={"kind": kind}, **allowed))
    for first in ("ddp", "fsdp"):
        on_two_ranks(tiny_config(data, tmp_path / first, parallel=first, optim={"kind": kind}))
    curves = {run: [event["loss"] for event in metrics(tmp_path / run, "train")] for run in ("ddp", "fsdp", "mixed", "mixed-2")}
    for curve in curves.values():
        assert curve == pytest.approx(curves["ddp"], rel=tolerance)
    names = {run: load_checkpoint(SavedRun(tmp_path / run), "latest").model.keys() for run in curves}
    assert len({tuple(sorted(found)) for found in names.values()}) == 1


def test_averages_samples_and_kept_checkpoints_are_those_that_are_set(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(name: str, temperature: float) -> Path:
        config = tiny_config(
            data,
            tmp_path / name,
            log={"average_steps": 3},
            eval={"sample_tokens": 16, "sample_temperature": temperature},
            checkpoint={"every_steps": 2, "keep_last": 1, "keep_every": 4},
            schedule={"power": 3.0},
            tf32=True,
        )
        train(config)
        return config.run

    with caplog.at_level(logging.WARNING):
        cold, hot = trained("cold", 0.0), trained("hot", 10.0)
    assert caplog.text.count("schedule.power has no effect: it needs schedule.kind = polynomial") == 2  # once in each run
    assert caplog.text.count("tf32 has no effect: it needs device = cuda") == 2
    assert losses(cold) == losses(hot)
    events = metrics(cold, "train")
    means = [sum(event["loss"] for event in events[max(0, end - 3) : end]) / min(3, end) for end in range(1, len(events) + 1)]
    assert [event["loss_average"] for event in events] == pytest.approx(means)
    assert [event["text"] for event in metrics(cold, "sample")] != [event["text"] for event in metrics(hot, "sample")]
    again = trained("cold-again", 0.0)
    assert [event["text"] for event in metrics(cold, "sample")] == [event["text"] for event in metrics(again, "sample")]
    best = min(metrics(cold, "eval"), key=lambda event: event["val_loss"])["step"]
    assert {int(path.name.rpartition("-")[2]) for path in (cold / "checkpoints").glob("step-*")} == {4, 8, 12} | {best}
