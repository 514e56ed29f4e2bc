"""`import trainer` in a program: the same settings, results and errors as the commands."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trainer
from common.errors import CheckpointError, ConfigError, PreparedDataError, StorageError
from common.settings.load import load_values
from tests.support.published import write_published
from tests.support.runs import ROOT
from trainer import library
from trainer.config import TrainConfig
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
    for number in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError, match="of "):
            rows[number]


def test_rows_go_to_another_process_after_a_shard_was_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    rows = trainer.open_rows(data.name)
    last = rows[-1]["tokens"]
    monkeypatch.chdir("/")
    sent = pickle.loads(pickle.dumps(rows))
    assert not sent._rows._open  # the descriptor of an open shard means another file there
    assert torch.equal(sent[len(rows) - 1]["tokens"], last)


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


WRONG: dict[str, dict[str, Any]] = {
    "model.width": {"model.widht": 3},
    "lr = 'fast'": {"optim": {"lr": "fast"}},
    "model: .*dictionary": {"model": 3},
    r"limits.steps = \[1, 2\]": {"limits.steps": [1, 2]},
    "limits.steps = 'true'": {"limits.steps": True},
    "given twice": {"model": {"layers": 2}, "model.layers": 3},
    "UTF-8": {"eval.prompt": "\ud800"},
    "init = 5: .*path": {"init": 5},
    "recipe = 5": {"recipe": 5},
    "help is not a setting": {"help": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_named(message: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer.train(data, tmp_path / "wrong", **WRONG[message])


def test_values_of_programs_are_those_of_the_command_line() -> None:
    values = {"data": Path("d"), "run": "r", "limits": {"steps": np.int64(3)}, "optim.lr": torch.tensor(0.5)}
    config = load_values(TrainConfig, values | {"eval.prompts": ["--x", "none"], "resume.allow_changes": "optim.lr", "seed": "7"})
    assert (config.data, config.limits.steps, config.optim.lr, config.seed) == (Path("d"), 3, 0.5, 7)
    assert (config.eval.prompts, config.resume.allow_changes) == (("--x", "none"), ("optim.lr",))


def test_errors_are_those_of_the_commands(folder: Path, data: Path, run: trainer.Run) -> None:
    with pytest.raises(CheckpointError, match=r"no run|not a run|missing"):
        trainer.open_run(folder / "nothing")
    with pytest.raises(PreparedDataError):
        trainer.open_rows(folder / "nothing")
    with pytest.raises(StorageError, match="this is a file"):
        trainer.train(data, folder / "text" / "0.txt", **SMALL)
    calls: list[Any] = [trainer.open_run, trainer.open_rows, lambda path: trainer.export(path, folder / "x")]
    for call in calls:
        with pytest.raises(ConfigError, match=r"path = None|data = None|RUN = None"):
            call(None)
    with pytest.raises(ConfigError, match="did you mean eval"):
        run.metrics("evla")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = trainer.trian


def test_a_model_refuses_prompts_that_are_not_texts_and_work_after_its_end(run: trainer.Run) -> None:
    model = run.load_model()
    prompts: list[Any] = [None, b"a", "\ud800"]
    for prompt in prompts:
        with pytest.raises(ConfigError, match="prompt"):
            model.generate(prompt)
    with pytest.raises(ConfigError, match="list of texts"):
        model.generate_all("abc")
    assert model.generate("Text 1", max_tokens=8, stop="e") == model.generate("Text 1", max_tokens=8, stop=["e"])
    model.close()
    with pytest.raises(ConfigError, match="is closed"):
        model.generate("a")


def test_a_process_is_as_before_after_a_start_and_a_model(run: trainer.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def state() -> tuple[object, ...]:
        root, generator = logging.getLogger(), torch.get_rng_state().numpy().tobytes()
        of_torch = torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
        return of_torch, generator, root.level, root.handlers[:], dict(os.environ), signal.getsignal(signal.SIGINT), Path.cwd()

    def use() -> None:
        torch.set_num_threads(2)
        before = state()
        trainer.train(None, run)
        with trainer.open_run(run).load_model() as model:
            next(model.stream("Text", max_tokens=2), None)
            after.append((before, state()))

    after: list[tuple[object, object]] = []
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [one == other for one, other in after] == [True], after


def test_a_process_trains_one_run_at_a_time(data: Path, tmp_path: Path) -> None:
    with library._training, pytest.raises(ConfigError, match="this process trains another run"):
        trainer.train(data, tmp_path / "run", **SMALL)


def test_importing_it_loads_nothing() -> None:
    code = "import trainer, sys; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys(); trainer.open_run"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
