"""Whole runs that classify documents: they learn, resume, and have the same bits on one and two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import ConfigError, ExitCode
from tests.support.labelled import WORDS, labelled_records, prepare_labelled, write_records
from tests.support.runs import ROOT, arguments, losses, metrics, run_command, start_ranks, tiny_config, wait_for_step
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.report.summary import summary_lines
from trainer.verification.audit import audit_run
from trainer.verification.replay import replay_run

STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_labelled(tmp_path_factory.mktemp("labelled"), labelled_records(360))


def configured(data: Path, run: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "objective": "classification",
        "model": {"context": 64},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "limits": {"steps": STEPS},
        "schedule": {"decay_steps": STEPS},
        "eval": {"every_steps": 8},
        "checkpoint": {"every_steps": 8},
    }
    for name, value in changes.items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    return tiny_config(data, run, **settings)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run, and its last line."""
    run = tmp_path_factory.mktemp("runs") / "run"
    return run, train(configured(data, run, log={"report": True}))


def trained_by_ranks(config: TrainConfig, num_ranks: int) -> str:
    """Return the last line of a run on several ranks."""
    log = config.run.with_suffix(".log")
    assert start_ranks(config, num_ranks).wait(timeout=300) == ExitCode.DONE, log.read_text()
    return [line for line in log.read_text().splitlines() if line.startswith("weights sha256:")][-1]


def test_it_learns_the_labels_and_measures_them_at_each_evaluation(finished: tuple[Path, str]) -> None:
    run, _ = finished
    measured = metrics(run, "measures")
    assert [one["step"] for one in measured] == [0, 8, 16, 24]
    assert measured[-1]["values"]["accuracy"] > 0.95
    assert measured[-1]["values"]["f1_macro"] > 0.95
    counts = {name: sum(row.values()) for name, row in measured[-1]["confusion"].items()}
    assert sum(counts.values()) == metrics(run, "eval")[-1]["targets"]
    assert "bits_per_byte" not in metrics(run, "eval")[-1]
    assert not metrics(run, "sample")


def test_the_loss_is_the_mean_over_the_documents_of_the_global_batch(
    data: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """A micro-batch of all rows adds up the same documents, so only rounding differs."""
    run, whole = finished[0], tmp_path / "whole"
    train(configured(data, whole, batch={"micro_batch_size": 8}, limits={"steps": 3}))
    for (_, small), (_, large) in zip(losses(run)[:3], losses(whole), strict=True):
        assert float.fromhex(small) == pytest.approx(float.fromhex(large), rel=1e-5)
    assert float.fromhex(losses(run)[0][1]) == pytest.approx(metrics(run, "eval")[0]["val_loss"], rel=0.2)


def test_report_and_tensorboard_show_the_measures(finished: tuple[Path, str]) -> None:
    run, _ = finished
    page = (run / "report.html").read_text()
    assert all(label in page for label in WORDS)
    assert "Confusion at step 24" in page
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert "measures/accuracy" in events.Tags()["scalars"]
    assert [event.step for event in events.Images("measures/confusion")] == [0, 8, 16, 24]


def test_evaluate_prints_the_measures_of_the_last_evaluation(finished: tuple[Path, str]) -> None:
    run, _ = finished
    printed = json.loads(evaluate_run(EvaluateOptions(run=run, as_json=True)))
    assert printed["measures"]["values"] == metrics(run, "measures")[-1]["values"]
    assert "perplexity" not in printed
    assert not [line for line in (run / "metrics.jsonl").read_text().splitlines() if "perplexity" in line]
    assert f"accuracy {printed['measures']['values']['accuracy']:.4f}" in summary_lines(run)[1]
    assert "macro F1" in evaluate_run(EvaluateOptions(run=run))


def test_new_texts_get_a_label_and_probabilities(finished: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = finished
    (tmp_path / "metal.txt").write_text("copper tin zinc lead iron nickel\n" * 40)  # longer than a row
    records = labelled_records(30, seed=5)
    write_records(tmp_path / "new.jsonl", records)
    done = run_command("trainer", "classify", str(run), str(tmp_path / "metal.txt"), str(tmp_path / "new.jsonl"), "--batch", "7")
    assert done.returncode == 0, done.stderr
    first, *others = map(json.loads, done.stdout.splitlines())
    assert first["label"] == "metal"
    assert sum(first["probabilities"].values()) == pytest.approx(1)
    assert [one["line"] for one in others] == list(range(1, 31))
    right = Counter(one["label"] == record["label"] for one, record in zip(others, records, strict=True))
    assert right[True] >= 28
    (tmp_path / "dirty.txt").write_text("copper\x0ctin zi\x07nc\r\n" * 3)  # control characters and line ends
    (tmp_path / "clean.txt").write_text("copper tin zinc\n" * 3)
    done = run_command("trainer", "classify", str(run), str(tmp_path / "dirty.txt"), str(tmp_path / "clean.txt"))
    dirty, clean = map(json.loads, done.stdout.splitlines())
    assert dirty["probabilities"] == clean["probabilities"]  # as prepare has cleaned the texts of the training


def test_classify_refuses_a_run_of_a_language_model_and_a_file_without_texts(
    data: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "language"
    train(tiny_config(data, run, model={"context": 64}, limits={"steps": 1}))
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n')
    done = run_command("trainer", "classify", str(run), str(tmp_path / "bad.jsonl"))
    assert (done.returncode, "name a run with objective = classification" in done.stderr) == (2, True)
    done = run_command("trainer", "classify", str(finished[0]), str(tmp_path / "bad.jsonl"))
    assert (done.returncode, 'bad.jsonl, line 1: no text under "text"' in done.stderr) == (2, True)
    done = run_command("trainer", "generate", str(finished[0]), "--prompt", "x")
    assert (done.returncode, "does not continue texts" in done.stderr) == (2, True)


def test_one_and_two_ranks_have_the_same_bits_under_elastic(data: Path, tmp_path: Path) -> None:
    weighted = {"classification": {"class_weights": "balanced"}, "loss": {"label_smoothing": 0.1}, "reproducibility": "elastic"}
    one, two = (configured(data, tmp_path / name, **weighted) for name in ("one", "two"))
    assert train(one) == trained_by_ranks(two, 2)
    assert losses(one.run) == losses(two.run)
    assert metrics(one.run, "measures") == metrics(two.run, "measures")


def test_two_ranks_of_ddp_stop_and_resume_exactly(data: Path, tmp_path: Path) -> None:
    whole, parts = configured(data, tmp_path / "whole"), configured(data, tmp_path / "parts")
    last_line = trained_by_ranks(whole, 2)
    trained_by_ranks(parts.model_copy(update={"limits": parts.limits.model_copy(update={"steps": 8})}), 2)
    assert trained_by_ranks(parts, 2) == last_line


def test_a_run_that_was_killed_resumes_to_the_same_bits(data: Path, finished: tuple[Path, str], tmp_path: Path) -> None:
    config = configured(data, tmp_path / "killed")
    command = [sys.executable, "-m", "trainer", "train", *arguments(config)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(config.run, 11)
    process.kill()
    process.wait()
    assert train(config) == finished[1]
    assert metrics(config.run, "measures") == metrics(finished[0], "measures")


def test_audit_and_replay_prove_the_run(finished: tuple[Path, str]) -> None:
    run, _ = finished
    assert audit_run(run).steps == STEPS
    assert replay_run(run, 6, train=train).difference == ""


def test_a_language_model_of_the_same_data_is_a_start(data: Path, tmp_path: Path) -> None:
    language = tmp_path / "language"
    train(tiny_config(data, language, model={"context": 64}, limits={"steps": 4}))
    run = tmp_path / "run"
    train(configured(data, run, init=language, model={}, limits={"steps": 2}))
    fresh = configured(data, tmp_path / "fresh", limits={"steps": 2})
    train(fresh)
    assert losses(run)[0] != losses(fresh.run)[0]


def test_data_without_labels_and_a_wrong_number_of_weights_are_refused(data: Path, tmp_path: Path) -> None:
    plain = prepare_labelled(tmp_path, labelled_records(60), records={})
    with pytest.raises(ConfigError, match=r"run `prepare` with --records\.label_field"):
        train(configured(plain, tmp_path / "run"))
    weights = {"class_weights": "list", "weights": (1.0, 2.0)}
    with pytest.raises(ConfigError, match=r"has 2 numbers, but the data has 3 labels: animal, colour, metal"):
        train(configured(data, tmp_path / "run", classification=weights))


def test_the_language_model_of_labelled_data_ignores_the_labels(data: Path, tmp_path: Path) -> None:
    train(tiny_config(data, tmp_path / "run", model={"context": 64}, limits={"steps": 2}))
    assert not metrics(tmp_path / "run", "measures")
    assert metrics(tmp_path / "run", "eval")[0]["bits_per_byte"] > 0
