"""A loss mask from records with a prompt, through preparation, packing, training, ledger and audit."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from common.errors import PreparedDataError
from common.files import digest_file
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.dataset.stored_documents import read_documents
from data_pipeline.prepare import prepare
from data_pipeline.repack import repack
from data_pipeline.reports.terminal import describe, summarise
from data_pipeline.tokenizer import load_tokenizer
from tests.support.ranks import run_ranks
from tests.support.runs import metrics, tiny_config
from trainer.context import RunContext
from trainer.data.batch import IGNORE, micro_batch
from trainer.distributed.group import Group
from trainer.evaluation.evaluate import evaluate
from trainer.loop import train
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule
from trainer.verification.audit import audit_run, show_step

WORDS = ["alpha", "beta", "gamma", "naïve", "日本", "delta"]
LENGTH = 32


def record(number: int) -> tuple[str, str]:
    prompt = f"Q{number}: {' '.join(WORDS[(number * place) % 6] for place in range(2 + number % 9))}"
    answer = f"A{number} {' '.join(WORDS[(number + place) % 6] for place in range(2 + number % 5))}."
    return prompt, answer


RECORDS = [record(number) for number in range(60)]


def config_of(folder: Path, output: Path, **changes: Any) -> PrepareConfig:
    settings: dict[str, Any] = {
        "source": {
            "plain": {"paths": (str(folder / "plain.jsonl"),)},
            "chat": {"paths": (str(folder / "chat.jsonl"),), "records": {"text_field": "answer", "prompt_field": "prompt"}},
        },
        "output": output,
        "workers": 1,
        "row_length": LENGTH,
        "tokenizer": {"kind": "byte"},
        "dedup": {"near": False},
        "split": {"val_fraction": 0.2},
        "packing": {"shard_bytes": 4096, "window_tokens": 1024},
    }
    return PrepareConfig(**settings | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    chat = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in RECORDS)
    (folder / "chat.jsonl").write_text("".join(chat))
    plain = (json.dumps({"text": f"{number} plain words without any prompt, {number}"}) + "\n" for number in range(30))
    (folder / "plain.jsonl").write_text("".join(plain))
    return folder


@pytest.fixture(scope="module")
def data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "out"
    prepare(config_of(folder, output))
    return output


def targets_of_documents(directory: Path, manifest: Manifest, split: str) -> dict[int, list[int]]:
    """Return the targets of each document, from all its pieces in the order of the rows."""
    rows = Rows(directory, manifest, split)
    found: dict[int, list[int]] = {}
    for number in range(len(rows)):
        batch = micro_batch(rows.read(np.array([number])))
        assert int((batch.targets != IGNORE).sum()) == rows.num_targets(np.array([number]))[0]
        for index, identity in enumerate(rows.document_ids(number).tolist()):
            targets = batch.targets[0][batch.segments[0] == index]
            found.setdefault(identity, []).extend(targets[targets != IGNORE].tolist())
    return found


@pytest.mark.parametrize("row_length", [LENGTH, 256])
def test_the_targets_are_the_answers_each_token_once(folder: Path, data: Path, tmp_path: Path, row_length: int) -> None:
    directory = data if row_length == LENGTH else tmp_path / "wide"
    manifest = prepare(config_of(folder, directory, row_length=row_length))
    assert manifest.format == "packed-rows/3"
    tokenizer = load_tokenizer(directory / "tokenizer")
    answers = {f"{prompt}\n{answer}": answer for prompt, answer in RECORDS}
    for split in ("train", "val"):
        targets = targets_of_documents(directory, manifest, split)
        for document in read_documents(directory, manifest, split):  # type: ignore[arg-type]
            expected = [*tokenizer.encode(answers.get(document.text, document.text)), tokenizer.eos_id]
            assert (document.text in answers) == (document.source == "chat")
            if row_length == LENGTH:  # a document is cut, and its pieces can be in any order
                assert sorted(targets[document.id]) == sorted(expected)
            else:
                assert targets[document.id] == expected


def test_only_shards_and_tables_of_a_source_with_prompts_have_a_mask(data: Path) -> None:
    manifest = read_manifest(data)
    for shard in manifest.shards:
        names = pa.ipc.open_file(data / shard.path).schema.names
        assert ("loss_runs" in names) == (shard.source == "chat")
    for number, partition in enumerate(manifest.partitions):
        names = pa.ipc.open_file(data / "tokens" / f"{number:06d}.arrow").schema.names
        assert ("loss_runs" in names) == (partition["source"] == "chat")


def test_data_without_prompts_has_the_older_format_and_the_same_shards(folder: Path, data: Path, tmp_path: Path) -> None:
    alone = prepare(config_of(folder, tmp_path / "out", source={"plain": {"paths": (str(folder / "plain.jsonl"),)}}))
    assert alone.format == "packed-rows/2"
    with_prompts = {shard.path: shard.sha256 for shard in read_manifest(data).shards if shard.source == "plain"}
    assert {shard.path: shard.sha256 for shard in alone.shards} == with_prompts


def test_the_report_has_the_share_of_the_targets_with_a_loss(data: Path) -> None:
    manifest = read_manifest(data)
    rows, shards = manifest.totals["rows"]["train"], Rows(data, manifest, "train")
    segments = shards.read(np.arange(len(shards))).segments_BL
    with_all = sum(len(row[row >= 0]) - len(np.unique(row[row >= 0])) for row in segments)  # the first token is no target
    assert rows["targets"] + rows["targets_without_loss"] == with_all
    assert 0.3 < rows["loss_share"] < 0.9
    assert rows["loss_share"] == pytest.approx(rows["targets"] / (rows["targets"] + rows["targets_without_loss"]), abs=1e-6)
    assert "loss share" in describe(summarise(read_manifest(data)))
    assert "share with loss" in (data / "report.html").read_text()
    assert "Prompts have no loss" in (data / "DATA_CARD.md").read_text()


def test_repacking_keeps_the_mask(folder: Path, data: Path, tmp_path: Path) -> None:
    again = repack(data, tmp_path / "again", 256, workers=1)
    direct = prepare(config_of(folder, tmp_path / "direct", row_length=256))
    assert again.format == "packed-rows/3"
    assert {shard.path: shard.sha256 for shard in again.shards} == {shard.path: shard.sha256 for shard in direct.shards}


@pytest.mark.parametrize("runs", [[3, 4], [0, 0, 5], [None]])
def test_a_stored_mask_that_does_not_fit_its_document_is_refused(data: Path, tmp_path: Path, runs: list[int | None]) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    manifest = read_manifest(copy)
    name = f"tokens/{[partition['source'] for partition in manifest.partitions].index('chat'):06d}.arrow"
    table = pa.ipc.open_file(copy / name).read_all()
    column = pa.array([runs] * table.num_rows, pa.list_(pa.uint32()))
    table = table.set_column(table.schema.get_field_index("loss_runs"), "loss_runs", column)
    (copy / name).unlink()
    with pa.ipc.new_file(copy / name, table.schema) as writer:
        writer.write_table(table)
    digests = manifest.files | {name: digest_file(copy / name)}
    (copy / "manifest.json").write_bytes(replace(manifest, files=digests).sealed()[1])
    with pytest.raises(PreparedDataError, match="these tables cannot be read"):
        repack(copy, tmp_path / "out", 64, workers=1)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    train(tiny_config(data, run, limits={"steps": 4}, schedule={"warmup_steps": 1, "decay_steps": 4}))
    return run


def test_ledger_token_counts_and_evaluation_count_targets_with_a_loss(data: Path, run: Path) -> None:
    manifest = read_manifest(data)
    report = audit_run(run, data=data)
    assert metrics(run, "train")[-1]["tokens"] == report.targets
    shown = [json.loads(show_step(run, step, data=data, as_json=True)) for step in range(1, 5)]
    assert sum(step["targets"] for step in shown) == report.targets
    rows = Rows(data, manifest, "train")
    numbers = np.array([row["row"] for step in shown for row in step["rows"]])
    assert int(rows.num_targets(numbers).sum()) == report.targets
    val = sum(shard.targets for shard in manifest.shards if shard.split == "val")
    assert {event["targets"] for event in metrics(run, "eval")} == {val}


def test_the_audit_of_a_step_shows_which_part_has_a_loss(data: Path, run: Path) -> None:
    page = show_step(run, 1, data=data, full=True)
    assert re.search(r"with a loss, \d+ tokens:\n    .*", page)
    parts = []
    for step in range(1, 5):
        for row in json.loads(show_step(run, step, data=data, full=True, as_json=True))["rows"]:
            for document in row["documents"]:
                assert ("parts" in document) == (row["source"] == "chat")
                assert sum(part["tokens"] for part in document.get("parts", [])) in (0, document["tokens"])
                parts += document.get("parts", [])
    prompts = "".join(f"⟨bos⟩{prompt}\n" for prompt, _ in RECORDS)
    assert all(part["text"].strip("\ufffd") in prompts for part in parts if not part["loss"])
    answers = "".join(f"{answer}⟨eos⟩" for _, answer in RECORDS)
    assert all(part["text"].strip("\ufffd") in answers for part in parts if part["loss"])
    assert {part["loss"] for part in parts} == {True, False}


def masked_loss(group: Group, data: Path, micro: int) -> str:
    config = tiny_config(data, data, eval={"micro_batch_size": micro})
    manifest = read_manifest(data)
    loss = LossModule(build_model(config.model, manifest.vocab_size, 0), config.loss)
    return evaluate(loss, RunContext(config, manifest, group, "sdpa"), Rows(data, manifest, "val")).loss.hex()


@pytest.mark.long
def test_the_validation_loss_has_the_same_bits_for_any_number_of_ranks(data: Path) -> None:
    alone = masked_loss(Group(0, 1, 0, torch.device("cpu")), data, 3)
    assert run_ranks(masked_loss, 2, data, 3) == [alone] * 2


def test_the_training_loss_does_not_depend_on_the_micro_batch(data: Path, tmp_path: Path) -> None:
    losses = []
    for micro in (1, 8):
        config = tiny_config(
            data,
            tmp_path / str(micro),
            batch={"micro_batch_size": micro},
            limits={"steps": 3},
            schedule={"warmup_steps": 1, "decay_steps": 3},
            eval={"every_steps": 3, "sample_tokens": 0},
        )
        train(config)
        losses.append([event["loss"] for event in metrics(config.run, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_data_without_any_target_is_refused(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    manifest = read_manifest(copy)
    emptied = replace(manifest, shards=tuple(replace(shard, targets=0) for shard in manifest.shards))
    (copy / "manifest.json").write_bytes(emptied.sealed()[1])
    with pytest.raises(PreparedDataError, match="no token of the training rows has a loss"):
        train(tiny_config(copy, tmp_path / "run"))
