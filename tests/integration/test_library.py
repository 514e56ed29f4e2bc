"""`import trainer` in a program: the same settings, results and errors as the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import trainer
from common.errors import CheckpointError, ConfigError, PreparedDataError
from tests.support.published import write_published
from tests.support.runs import ROOT
from trainer.runs.saved_run import SavedRun

SMALL = {
    "model": {"layers": 2, "width": 32, "heads": 4, "context": 32},
    "batch.global_batch_size": 8,
    "batch.micro_batch_size": 4,
    "schedule.warmup_steps": 1,
    "limits.steps": 4,
    "eval": {"every_steps": 2, "sample_tokens": 4},
    "checkpoint.every_steps": 2,
    "device": "cpu",
    "threads": 1,
    "log.report": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"Text {number} tells of the sea and of {number * 7} birds above it. " * 5)
    return trainer.prepare(text, folder / "data", tokenizer={"kind": "byte"}, row_length=32, workers=1, **{"dedup.near": False})


@pytest.fixture(scope="module")
def run(folder: Path, data: Path) -> trainer.Run:
    return trainer.train(data, folder / "run", **SMALL)


def test_a_run_has_its_record_metrics_checkpoints_and_samples(run: trainer.Run) -> None:
    assert run.record.status == "finished"
    assert [event["step"] for event in run.metrics()] == [1, 2, 3, 4]
    assert all(event["loss"] > 0 for event in run.metrics())
    assert [event["step"] for event in run.metrics("eval")] == [0, 2, 4]
    assert len(run.samples) == len(run.metrics("sample")) > 0
    assert run.checkpoints[-1] == 4
    assert run.config.model.layers == 2
    assert run.report.name == "report.html"


def test_a_model_continues_texts(run: trainer.Run) -> None:
    with run.load_model() as model:
        text = model.generate("Text 1", max_tokens=8, seed=3)
        assert text == model.generate("Text 1", max_tokens=8, seed=3) == "".join(model.stream("Text 1", max_tokens=8, seed=3))
        assert len(model.generate_all(["Text", "sea"], max_tokens=4, temperature=0)) == 2
        assert model.tokenizer.vocab_size == 260
        assert sum(weight.numel() for weight in model.module.parameters()) > 1000
        with pytest.raises(ConfigError, match="temperature"):
            model.generate("a", temperature=-1)


def test_rows_are_a_dataset_with_pieces_and_masks(data: Path) -> None:
    rows = trainer.open_rows(data)
    row = rows[0]
    assert row["tokens"].shape == row["segments"].shape == row["mask"].shape == (32,)
    assert row["lengths"].sum() == (row["segments"] >= 0).sum()
    assert len(rows.document_ids(0)) == len(row["lengths"])
    starts = torch.tensor([0, *row["lengths"].cumsum(0)[:-1].tolist()])
    assert not row["mask"][starts].any()
    assert row["mask"].sum() == row["lengths"].sum() - len(row["lengths"])
    batch = next(iter(DataLoader(rows, batch_size=3, collate_fn=rows.collate)))
    assert batch["tokens"].shape == (3, 32)
    assert batch["pieces"].tolist() == [len(rows[number]["lengths"]) for number in range(3)]
    assert batch["lengths"].tolist() == [length for number in range(3) for length in rows[number]["lengths"].tolist()]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_the_mask_leaves_out_prompts(tmp_path: Path) -> None:
    records = [{"prompt": f"Question {number}?", "text": f"Answer {number * 7}"} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    data = trainer.prepare(
        tmp_path / "a.jsonl",
        tmp_path / "data",
        records={"prompt_field": "prompt"},
        tokenizer={"kind": "byte"},
        row_length=64,
        dedup={"near": False},
        clean={"min_chars": 1},
    )
    rows = trainer.open_rows(data)
    text = rows.tokenizer.decode(rows[0]["tokens"][rows[0]["mask"]].tolist())
    assert "Answer" in text
    assert "Question" not in text


def test_a_training_goes_on_where_it_was(folder: Path, data: Path, run: trainer.Run) -> None:
    longer = trainer.train(data, folder / "longer", **SMALL | {"limits.steps": 2, "schedule.decay_steps": 4})
    assert longer.checkpoints[-1] == 2
    trainer.train(data, folder / "longer", **SMALL | {"schedule.decay_steps": 4})
    assert SavedRun(folder / "longer").record.weights == run.record.weights


def test_a_model_goes_out_and_comes_back(folder: Path, run: trainer.Run) -> None:
    exported = trainer.export(run, folder / "exported")
    back = trainer.import_model(exported, folder / "back")
    with run.load_model() as one, back.load_model() as other:
        assert one.generate("Text", temperature=0, max_tokens=6) == other.generate("Text", temperature=0, max_tokens=6)
    published = trainer.import_model(write_published(folder / "published"), folder / "imported")
    assert published.record.status == "imported"


def test_errors_are_those_of_the_commands(folder: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="width"):
        trainer.train(data, folder / "wrong", **{"model.widht": 3})
    with pytest.raises(ConfigError, match="lr"):
        trainer.train(data, folder / "wrong", optim={"lr": "fast"})
    with pytest.raises(CheckpointError, match=r"no run|not a run|missing"):
        trainer.open_run(folder / "nothing")
    with pytest.raises(PreparedDataError):
        trainer.open_rows(folder / "nothing")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = trainer.trian


def test_importing_it_loads_nothing() -> None:
    code = "import trainer, sys; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys(); trainer.open_run"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
