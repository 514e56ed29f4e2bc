"""Whole runs that classify documents with small encoders of random weights, as transformers saves them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError, ExitCode
from tests.support.encoders import write_encoder
from tests.support.labelled import labelled_records, prepare_labelled
from tests.support.runs import losses, metrics, run_command, start_ranks, tiny_config
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.verification.replay import replay_run

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=["roberta", "bert"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An encoder, and data that its tokenizer has prepared."""
    folder = tmp_path_factory.mktemp(request.param)
    records = labelled_records(240)
    encoder = write_encoder(folder / "encoder", request.param, [record["text"] for record in records])
    return encoder, prepare_labelled(folder, records, tokenizer={"path": encoder})


def configured(prepared: tuple[Path, Path], run: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "objective": "classification",
        "encoder": prepared[0],
        "limits": {"steps": 12},
        "eval": {"every_steps": 6},
        "checkpoint": {"every_steps": 6},
        "optim": {"lr": 5e-3},
    }
    return tiny_config(prepared[1], run, **settings | changes)


def test_it_begins_with_the_weights_of_the_encoder_learns_and_replays(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(configured(prepared, run))
    before, *_, after = metrics(run, "measures")
    assert after["values"]["accuracy"] > 0.9 > before["values"]["accuracy"]
    assert replay_run(run, 4, train=train).difference == ""
    assert (run / "objective" / "encoder.json").read_bytes() == (prepared[0] / "config.json").read_bytes()


def test_the_states_are_those_of_transformers(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    from trainer.finetuning.encoder import Encoder  # noqa: PLC0415 - with the optional package

    transformers = import_module("transformers")
    files = {"encoder.json": (prepared[0] / "config.json").read_bytes()}
    run = tmp_path / "run"
    train(configured(prepared, run, limits={"steps": 1}))
    files["encoder_weights.json"] = (run / "objective" / "encoder_weights.json").read_bytes()
    encoder = Encoder(files, 3, "mean", prepared[0])
    ours = encoder.build(0)
    for name, weight in encoder.pretrained().items():
        ours.get_parameter(name).data.copy_(weight)
    theirs = transformers.AutoModel.from_pretrained(prepared[0], attn_implementation="eager").eval()
    tokens = torch.tensor([[4, 10, 11, 12]])
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        found = ours.eval().encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        assert torch.equal(found, theirs(input_ids=tokens, attention_mask=mask).last_hidden_state)


def test_a_stopped_run_resumes_to_the_same_bits_with_its_dropout(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    whole, parts = (configured(prepared, tmp_path / name, classification={"pooling": "cls"}) for name in ("whole", "parts"))
    last_line = train(whole)
    train(parts.model_copy(update={"limits": parts.limits.model_copy(update={"steps": 6})}))
    assert train(parts) == last_line


def test_one_and_two_ranks_have_the_same_bits_under_elastic(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = (configured(prepared, tmp_path / name, reproducibility="elastic") for name in ("one", "two"))
    last_line = train(one)
    assert start_ranks(two, 2).wait(timeout=300) == ExitCode.DONE, two.run.with_suffix(".log").read_text()
    assert last_line in two.run.with_suffix(".log").read_text()
    assert losses(one.run) == losses(two.run)


def test_a_saved_run_needs_no_encoder_directory(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    moved = tmp_path / "encoder"
    moved.symlink_to(prepared[0])
    run = tmp_path / "run"
    train(configured((moved, prepared[1]), run))
    moved.unlink()
    (tmp_path / "new.txt").write_text("iron zinc copper tin")
    done = run_command("trainer", "classify", str(run), str(tmp_path / "new.txt"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == "metal"


def test_a_resume_needs_no_encoder_directory_and_refuses_a_changed_configuration(
    prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = configured(prepared, tmp_path / "whole")
    last_line = train(whole)
    moved = tmp_path / "encoder"
    moved.symlink_to(prepared[0])
    parts = configured((moved, prepared[1]), tmp_path / "parts")
    train(parts.model_copy(update={"limits": parts.limits.model_copy(update={"steps": 6})}))
    moved.unlink()
    kept = parts.run / "objective" / "encoder.json"
    content = kept.read_bytes()
    kept.write_bytes(content + b" ")
    with pytest.raises((ConfigError, CheckpointError), match=r"objective|encoder"):
        train(parts)
    kept.write_bytes(content)
    assert train(parts) == last_line
    with pytest.raises(ConfigError, match=r"encoder: .*config\.json cannot be read"):
        train(parts.model_copy(update={"run": tmp_path / "new"}))


def test_what_does_not_fit_is_refused(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    encoder, data = prepared
    records = labelled_records(60)
    (tmp_path / "bytes").mkdir()
    other = prepare_labelled(tmp_path / "bytes", records)
    with pytest.raises(ConfigError, match=r"prepared with another tokenizer; prepare it with --tokenizer\.path"):
        train(configured((encoder, other), tmp_path / "run"))
    (tmp_path / "long").mkdir()
    long = prepare_labelled(tmp_path / "long", records, tokenizer={"path": encoder}, row_length=128)
    with pytest.raises(ConfigError, match="cannot take documents of 128 tokens"):
        train(configured((encoder, long), tmp_path / "run", model={"context": 128}))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((encoder / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in it, and no other form of weights is read"):
        train(configured((pickled, data), tmp_path / "run"))
    assert not (tmp_path / "run" / "record.json").exists()
