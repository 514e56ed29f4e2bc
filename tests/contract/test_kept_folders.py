"""Data and runs that an older version wrote are read, verified and continued (`tests/golden/kept.py` made them)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.kept import KEPT
from tests.support.runs import losses, metrics, run_command
from trainer.machine.determinism import cpu_kernels

WEIGHTS_AFTER_RESUME = "sha256:85148184cbca21ddb718ea024e1ac9792b7a034c6c23d7c0ba0a1960d7ece4ef"
"""Of the processor that wrote the folders, with the products of this version."""
CHANGES = ("--resume.allow_changes", "torch", "device", "kernels")
"""What may differ between the machine that wrote the folders and the one that runs the test."""


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def trainer(*words: object, module: str = "trainer") -> str:
    done = run_command(module, *map(str, words))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def has_same_kernels(record: dict[str, Any]) -> bool:
    return (record["identity"]["device"], record["identity"]["torch"]) == (f"cpu, {cpu_kernels()}", torch.__version__)


@pytest.mark.long
def test_prepared_data_of_an_older_version_is_intact_and_can_be_trained_on(kept: Path) -> None:
    assert "7 files match" in trainer("verify", kept / "data", module="data_pipeline")
    model = ("--model.layers", "1", "--model.width", "16", "--model.heads", "1", "--model.kv_heads", "1", "--model.context", "64")
    limits = ("--limits.steps", "1", "--eval.sample_tokens", "0", "--log.report", "false", "--device", "cpu")
    trainer("train", "--data", kept / "data", "--run", kept / "new", *model, *limits)
    digest = json.loads((kept / "data" / "manifest.json").read_text())["root_digest"]
    assert json.loads((kept / "new" / "record.json").read_text())["data"]["root_digest"] == digest


@pytest.mark.long
def test_a_finished_run_of_an_older_version_is_verified_shown_and_used(kept: Path) -> None:
    run, before = kept / "finished", (kept / "finished" / "record.json").read_bytes()
    recorded = json.loads(before)
    verified = run_command("trainer", "verify", str(run), "--data", str(kept / "data"), "--replay", "3")
    # The version that wrote the folders recorded no library of products, and took another one for the gradients of weights.
    reason = "the environment differs in kernels"
    assert (verified.returncode == 0) != (reason in verified.stderr) or not has_same_kernels(recorded), (
        verified.stdout + verified.stderr
    )
    assert "161 ledger lines, 202 events of metrics and 7 files of the data are unchanged" in verified.stdout
    again = trainer("train", "--data", kept / "data", "--run", run)
    assert f"{recorded['weights']} steps {recorded['step']}" in again
    assert (run / "record.json").read_bytes() == before
    (last,) = [event for event in metrics(run, "eval") if event["step"] == recorded["step"]]
    evaluated = json.loads(trainer("evaluate", run, "--data", kept / "data", "--json").splitlines()[0])
    assert evaluated["val_loss"] == pytest.approx(last["val_loss"], abs=1e-4)
    assert trainer("generate", run, "--max_tokens", "5", "--prompt", "a")
    trainer("report", run)
    assert f"{last['val_loss']:.4f}" in (run / "report.html").read_text()


@pytest.mark.long
def test_a_stopped_run_of_an_older_version_is_resumed_to_its_end(kept: Path) -> None:
    run = kept / "stopped"
    recorded = json.loads((run / "record.json").read_text())
    assert [one["was"] for one in recorded["earlier"]] == [{"optim.lr": 0.0006}]
    steps = losses(run)
    trainer("train", "--data", kept / "data", "--run", run, *CHANGES)
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["step"], record["earlier"][0]) == ("finished", 160, recorded["earlier"][0])
    assert losses(run)[: len(steps)] == steps
    assert metrics(run, "eval")[-1]["val_loss"] == pytest.approx(3.3635, abs=0.01)
    if has_same_kernels(recorded):
        assert record["weights"] == WEIGHTS_AFTER_RESUME
    verified = run_command("trainer", "verify", str(run), "--data", str(kept / "data"))
    assert "161 ledger lines" in verified.stdout
