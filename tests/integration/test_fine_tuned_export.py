"""A published model that was trained on: its export has the ends, bos, template and advice of its directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import trainer
from data_pipeline.tokenizer import load_tokenizer
from tests.support.published import SENTENCES, write_published
from trainer.commands.compress import CompressOptions
from trainer.commands.compress import run as compress

ADVICE = {"do_sample": True, "temperature": 0.6, "top_k": 20}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
SHORT: dict[str, Any] = {
    "limits.steps": 1,
    "batch.global_batch_size": 2,
    "batch.micro_batch_size": 2,
    "schedule.warmup_steps": 0,
    "schedule.decay_steps": 4,
    "eval.sample_tokens": 0,
    "device": "cpu",
    "threads": 1,
    "log.report": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    directory = write_published(folder / "published")
    (directory / "generation_config.json").write_text(json.dumps(ADVICE | {"eos_token_id": [0, 7, 9]}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    trainer.import_model(directory, folder / "imported")
    (folder / "text.txt").write_text("\n\n".join(SENTENCES))
    return folder


def prepared(folder: Path, name: str, **settings: Any) -> Path:
    settings = {"row_length": 32, "workers": 1, "text.documents": "paragraphs", "dedup.near": False} | settings
    return trainer.prepare(folder / "text.txt", folder / name, **settings)


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return prepared(folder, "data", **{"tokenizer.path": folder / "published"})


@pytest.fixture(scope="module")
def run(folder: Path, data: Path) -> trainer.Run:
    return trainer.train(data, folder / "run", init=folder / "imported", **{"lora.rank": 2}, **SHORT)


def generation_of(run: trainer.Run, folder: Path) -> dict[str, Any]:
    found = json.loads((trainer.export(run, folder / "export") / "generation_config.json").read_text())
    return {name: found.get(name) for name in (*ADVICE, "eos_token_id")}


def test_an_export_has_what_the_directory_said(run: trainer.Run, tmp_path: Path) -> None:
    assert generation_of(run, tmp_path) == ADVICE | {"eos_token_id": [0, 7, 9]}
    assert (tmp_path / "export/chat_template.jinja").read_text() == TEMPLATE
    with run.load_model() as model:
        assert model.tokenizer.end_ids == [0, 7, 9]


def test_so_have_a_run_that_continues_it_a_branch_and_a_compressed_model(
    data: Path, folder: Path, run: trainer.Run, tmp_path: Path
) -> None:
    longer = SHORT | {"limits.steps": 2, "lora.rank": 2, "init": folder / "imported"}
    branch = trainer.train(data, tmp_path / "branch", **{"branch.run": run.path}, **longer)
    resumed = Path(shutil.copytree(run.path, tmp_path / "resumed"))
    compress(CompressOptions(run=run.path, output=tmp_path / "small", method="prune"))
    for one in (branch, trainer.train(data, resumed, **longer), trainer.open_run(tmp_path / "small")):
        out = tmp_path / f"of-{one.path.name}"
        assert generation_of(one, out) == ADVICE | {"eos_token_id": [0, 7, 9]}
        assert (out / "export/chat_template.jinja").read_text() == TEMPLATE


def test_samples_at_evaluations_end_where_texts_of_the_run_end(data: Path, folder: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(folder / "published", tmp_path / "published"))
    ids = list(range(load_tokenizer(data / "tokenizer").vocab_size))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    start = trainer.import_model(directory, tmp_path / "imported")
    run = trainer.train(data, tmp_path / "run", init=start, **SHORT | {"eval.sample_tokens": 8})
    with run.load_model() as model:
        single = {model.tokenizer.decode([one]) for one in ids}
    written = {one["text"].removeprefix(one["prompt"]) for one in run.metrics("sample")}
    assert written
    assert written <= single


def test_documents_begin_with_bos_if_the_tokenizer_puts_it_there(
    folder: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert not load_tokenizer(data / "tokenizer").first_ids
    supplied = Path(shutil.copytree(folder / "published", tmp_path / "supplied"))
    config = json.loads((supplied / "tokenizer_config.json").read_text())
    (supplied / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|pad|>"}))
    settings = {"tokenizer.path": supplied}
    prepared(folder, "without", **settings)
    assert "tokenizer.add_bos = false, because" in caplog.text
    assert not load_tokenizer(folder / "without/tokenizer").first_ids
    prepared(folder, "with", **settings, **{"tokenizer.add_bos": True})
    assert load_tokenizer(folder / "with/tokenizer").first_ids == [1]
    prepared(folder, "with", **settings)  # as data that was prepared before the tokenizer decided
    assert "prepared with tokenizer.add_bos = true" in caplog.text
    library = Tokenizer.from_file(str(supplied / "tokenizer.json"))
    library.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)])
    library.save(str(supplied / "tokenizer.json"))
    caplog.clear()
    prepared(folder, "first", **settings)
    assert load_tokenizer(folder / "first/tokenizer").first_ids == [1]
    assert "add_bos" not in caplog.text
