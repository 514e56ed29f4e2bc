"""Every kind of fine-tuning, and what reads its runs, on the CPU and, if there is one, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.devices import needs_gpu, on_each_device
from tests.support.encoders import write_encoder
from tests.support.labelled import WORDS, labelled_records, prepare_labelled
from tests.support.pairs import write_pairs, write_trunk
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, run_command, tiny_config
from trainer.config import TrainConfig
from trainer.loop import train

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2}
"""Its head width is one that every implementation of attention accepts."""


def configured(data: Path, run: Path, device: str, **changes: Any) -> TrainConfig:
    usual = {
        "device": device,
        "compile": "off",
        "precision": "bf16" if device == "cuda" else "fp32",
        "checkpoint": {"every_steps": 6},
        "eval": {"every_steps": 6, "sample_tokens": 0},
    }
    return tiny_config(data, run, **usual | changes | {"model": MODEL | changes.get("model", {})})


def trained_whole_and_in_halves(config: TrainConfig) -> Path:
    """Train 12 steps at once, and in two halves that must end with the same bits. Return the run of the halves."""
    halves = config.model_copy(update={"run": config.run.with_name("halves")})
    train(halves.model_copy(update={"limits": config.limits.model_copy(update={"steps": 6})}))
    assert train(halves) == train(config)
    assert losses(halves.run) == losses(config.run)
    assert metrics(halves.run, "measures") == metrics(config.run, "measures")
    evaluations = metrics(config.run, "eval")
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"]
    return halves.run


def trained_base(folder: Path, device: str, **changes: Any) -> Path:
    run = folder / "base"
    train(configured(write_prepared(folder / "data", row_length=32), run, device, **changes))
    return run


@on_each_device
def test_adapters_train_to_the_same_bits_and_can_be_evaluated_exported_and_compared(tmp_path: Path, device: str) -> None:
    base = trained_base(tmp_path, device)
    other = write_prepared(tmp_path / "other", seed=5, row_length=32)
    changes: dict[str, Any] = {"init": base, "lora": {"rank": 4, "dropout": 0.1}, "compile": "on" if device == "cuda" else "off"}
    run = trained_whole_and_in_halves(configured(other, tmp_path / "whole", device, **changes))
    evaluated = run_command("trainer", "evaluate", str(run), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    expected = metrics(run, "eval")[-1]["val_loss"]
    assert json.loads(evaluated.stdout)["val_loss"] == pytest.approx(expected, rel=2e-2 if device == "cuda" else 1e-6)
    exported = run_command("trainer", "export", str(run), "--output", str(tmp_path / "export"))
    assert exported.returncode == 0, exported.stderr
    verified = run_command("trainer", "verify", str(run), "--export", str(tmp_path / "export"))
    assert verified.returncode == 0, verified.stderr


@on_each_device
def test_a_classifier_trains_to_the_same_bits_and_classifies(tmp_path: Path, device: str) -> None:
    data = prepare_labelled(tmp_path, labelled_records(240))
    changes = {"objective": "classification", "model": {"context": 64}}
    run = trained_whole_and_in_halves(configured(data, tmp_path / "whole", device, **changes))
    found = metrics(run, "measures")[-1]["values"]
    assert found["accuracy"] > 0.5
    (tmp_path / "new.txt").write_text("iron copper tin zinc")
    answered = run_command("trainer", "classify", str(run), str(tmp_path / "new.txt"))
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["label"] in WORDS


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
@on_each_device
@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_an_encoder_trains_to_the_same_bits(tmp_path: Path, device: str, kind: str) -> None:
    records = labelled_records(240)
    encoder = write_encoder(tmp_path / "encoder", kind, [record["text"] for record in records])
    data = prepare_labelled(tmp_path, records, tokenizer={"path": encoder})
    changes = {"objective": "classification", "encoder": encoder, "optim": {"lr": 5e-3}}
    trained_whole_and_in_halves(configured(data, tmp_path / "whole", device, **changes))


@on_each_device
def test_preferences_train_to_the_same_bits(tmp_path: Path, device: str) -> None:
    write_pairs(tmp_path)
    settings = {"device": device, "precision": "bf16" if device == "cuda" else "fp32", "compile": "off", "model": MODEL}
    trunk = write_trunk(tmp_path, **settings)
    changes = {"objective": "preference", "init": trunk, "model": {"context": 256}}
    run = trained_whole_and_in_halves(configured(tmp_path / "pairs", tmp_path / "whole", device, **changes))
    assert metrics(run, "eval")[0]["val_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert metrics(run, "measures")[-1]["values"]["margin"] > 0


@on_each_device
def test_a_student_trains_to_the_same_bits(tmp_path: Path, device: str) -> None:
    teacher = trained_base(tmp_path, device, model={"width": 128, "heads": 8})
    changes = {"objective": "distillation", "teacher": teacher}
    run = trained_whole_and_in_halves(configured(tmp_path / "data", tmp_path / "whole", device, **changes))
    divergences = [line["measures"]["divergence"] for line in metrics(run, "train")]
    assert 0 < divergences[-1] < divergences[0]


@on_each_device
def test_a_checkpoint_begins_a_run_on_the_other_device(tmp_path: Path, device: str) -> None:
    """A file has no device: weights of a GPU continue on a CPU, and the first loss there is that of the saved model."""
    base = trained_base(tmp_path, device)
    config = configured(tmp_path / "data", tmp_path / "next", "cpu", init=base, limits={"steps": 2})
    train(config)
    first, last = metrics(config.run, "eval")[0], metrics(base, "eval")[-1]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=2e-2 if device == "cuda" else 1e-6)


@on_each_device
def test_a_profile_has_the_work_of_the_device_and_changes_no_bit(tmp_path: Path, device: str) -> None:
    base = trained_base(tmp_path, device)
    profiled = configured(tmp_path / "data", tmp_path / "run", device, log={"report": False, "profile_steps": "3..4"})
    train(profiled)
    assert record_of(profiled.run)["weights"] == record_of(base)["weights"]
    events = json.loads((profiled.run / "profile/rank-0-steps-3-4.json").read_text())["traceEvents"]
    categories = {event.get("cat") for event in events}
    assert "cpu_op" in categories
    assert ("kernel" in categories) == (device == "cuda")
    assert (profiled.run / "profile/rank-0-steps-3-4.pickle").exists() == (device == "cuda")


@pytest.mark.gpu
@needs_gpu
def test_the_doctor_describes_the_gpu_and_finds_no_error(tmp_path: Path) -> None:
    done = run_command("trainer", "doctor", "--fast", "--json", "--run", str(tmp_path / "run"))
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["checks"]}
    about = torch.cuda.get_device_properties(0)
    assert about.name in rows["GPU 0"]["found"]
    assert f"compute capability {about.major}.{about.minor}" in rows["GPU 0"]["found"]
    for name in ("driver", "GPU 0", "torch"):
        assert rows[name]["severity"] in {"ok", "note"}, rows[name]


@pytest.mark.optional
@on_each_device
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_compressed_run_is_evaluated_and_writes_text(tmp_path: Path, device: str, method: str) -> None:
    base, small = trained_base(tmp_path, device), tmp_path / "small"
    done = run_command("trainer", "compress", str(base), "--method", method, "--output", str(small), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["after"]["weight_bytes"] < facts["before"]["weight_bytes"]
    evaluated = run_command("trainer", "evaluate", str(small), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["val_loss"] == pytest.approx(metrics(base, "eval")[-1]["val_loss"], rel=0.05)
    written = run_command("trainer", "generate", str(small), "--prompt", "ab", "--max_tokens", "8", "--seed", "3")
    assert written.returncode == 0, written.stderr
    assert written.stdout
