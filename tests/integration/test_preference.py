"""Preference pairs through the ordinary loop: what the model learns, the same bits after a kill and on more ranks, and replays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel

from common.errors import CheckpointError, ConfigError
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.repack import repack
from tests.support.pairs import pair_config, pair_records, write_pairs, write_trunk
from tests.support.records import record_of
from tests.support.runs import ROOT, arguments, losses, metrics, start_ranks, wait_for_step
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.loop import train
from trainer.report.summary import summary_lines
from trainer.report.write import write_report
from trainer.runs.saved_run import SavedRun
from trainer.verification.audit import audit_run
from trainer.verification.replay import replay_run
from trainer.verification.verify import check_integrity


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder)
    write_trunk(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    train(pair_config(folder / "pairs", folder / "trunk", folder / "whole"))
    return folder / "whole"


def test_training_raises_accuracy_and_margin_on_held_out_pairs(whole: Path) -> None:
    measured = [one["values"] for one in metrics(whole, "measures")]
    assert measured[0] == {"accuracy": 0.0, "margin": 0.0}
    assert measured[-1]["accuracy"] > 0.9
    assert measured[-1]["margin"] > measured[1]["margin"] > 0
    evaluations = [one["val_loss"] for one in metrics(whole, "eval")]
    assert evaluations[0] == pytest.approx(0.693147, abs=1e-6)
    assert evaluations[-1] < evaluations[0]
    steps = [one["measures"] for one in metrics(whole, "train")]
    assert steps[0] == {"accuracy": 0.0, "margin": 0.0}
    assert steps[-1]["margin"] > 0
    printed = json.loads(evaluate_run(EvaluateOptions(run=whole, as_json=True)))
    assert printed["measures"]["values"] == measured[-1]


def test_orpo_learns_the_better_answers_from_new_weights(folder: Path, tmp_path: Path) -> None:
    settings = {"init": None, "preference": {"loss": "orpo", "odds_weight": 1.0}, "limits": {"steps": 12}}
    train(pair_config(folder / "pairs", folder / "trunk", tmp_path / "run", **settings, schedule={"decay_steps": 12}))
    measured = [one["values"] for one in metrics(tmp_path / "run", "measures")]
    assert measured[-1]["accuracy"] > 0.9
    assert measured[-1]["margin"] > measured[0]["margin"]
    evaluations = [one["val_loss"] for one in metrics(tmp_path / "run", "eval")]
    assert evaluations[-1] < evaluations[0]
    assert not (tmp_path / "run" / "objective").exists()
    assert not replay_run(tmp_path / "run", 2, train=train, start=0).difference


def test_the_measures_of_pairs_take_the_place_of_the_perplexity(whole: Path) -> None:
    last = metrics(whole, "measures")[-1]["values"]
    words = f"accuracy {last['accuracy']:.4f}, margin {last['margin']:.4f}"
    shown = evaluate_run(EvaluateOptions(run=whole, by="source"))
    assert f"accuracy {last['accuracy']:.3f}" in shown
    assert f"nats per pair, {words}" in summary_lines(whole)[1]
    write_report(whole)
    page = (whole / "report.html").read_text()
    assert words in page
    assert "nats per pair" in page
    found = [evaluate_run(EvaluateOptions(run=whole, as_json=True)), shown, *summary_lines(whole), page]
    found.append((whole / "metrics.jsonl").read_text())
    assert not [text for text in found if "perplexity" in text.lower()]


def test_the_run_can_be_audited_verified_and_replayed(whole: Path) -> None:
    assert audit_run(whole).steps == 8
    check_integrity(SavedRun(whole))
    for start in (0, 6):
        assert not replay_run(whole, 2, train=train, start=start).difference


def test_a_resume_gives_the_same_bits_without_the_initial_run(folder: Path, whole: Path, tmp_path: Path) -> None:
    trunk = shutil.copytree(folder / "trunk", tmp_path / "trunk")
    config = pair_config(folder / "pairs", trunk, tmp_path / "run")
    train(config.model_copy(update={"limits": config.limits.model_copy(update={"steps": 4})}))
    shutil.rmtree(trunk)
    train(config)
    assert record_of(tmp_path / "run")["weights"] == record_of(whole)["weights"]
    assert losses(tmp_path / "run") == losses(whole)
    assert metrics(tmp_path / "run", "measures") == metrics(whole, "measures")


def test_a_run_whose_initial_weights_were_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    config = pair_config(folder / "pairs", folder / "trunk", tmp_path / "run", limits={"steps": 2})
    train(config)
    path = tmp_path / "run" / "objective" / "reference.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"reference\.safetensors: the weights have the digest"):
        train(pair_config(folder / "pairs", folder / "trunk", tmp_path / "run", limits={"steps": 4}))


def test_another_beta_is_another_run(folder: Path, tmp_path: Path) -> None:
    train(pair_config(folder / "pairs", folder / "trunk", tmp_path / "run", limits={"steps": 2}))
    with pytest.raises(ConfigError, match=r"preference\.beta was 0\.1 and is 0\.5"):
        train(pair_config(folder / "pairs", folder / "trunk", tmp_path / "run", preference={"beta": 0.5}))


@pytest.mark.long
def test_a_killed_run_continues_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    steps = {"limits": {"steps": 40}, "schedule": {"decay_steps": 40}}
    train(pair_config(folder / "pairs", folder / "trunk", tmp_path / "plain", **steps))
    config = pair_config(folder / "pairs", folder / "trunk", tmp_path / "killed", **steps)
    with subprocess.Popen([sys.executable, "-m", "trainer", "train", *arguments(config)], cwd=ROOT) as process:
        wait_for_step(config.run, 6)
        process.kill()
    assert process.returncode < 0
    train(config)
    assert record_of(config.run)["weights"] == record_of(tmp_path / "plain")["weights"]
    assert losses(config.run) == losses(tmp_path / "plain")


@pytest.mark.long
@pytest.mark.parametrize("preference", [{"label_smoothing": 0.1}, {"loss": "orpo"}], ids=["dpo", "orpo"])
def test_one_and_two_ranks_give_the_same_bits_also_in_turn(folder: Path, tmp_path: Path, preference: dict[str, Any]) -> None:
    found: list[Any] = []
    for ranks_of_starts in ((1,), (2, 1)):
        run = tmp_path / str(len(found))
        config = pair_config(folder / "pairs", folder / "trunk", run, reproducibility="elastic", preference=preference)
        for num_ranks, steps in zip(ranks_of_starts, (4, 8)[-len(ranks_of_starts) :], strict=True):
            part = config.model_copy(update={"limits": config.limits.model_copy(update={"steps": steps})})
            assert start_ranks(part, num_ranks).wait(timeout=300) == 0
        found.append((record_of(run)["weights"], losses(run), metrics(run, "measures")))
    assert found[0] == found[1]


def test_pairs_are_not_cut_when_they_are_packed_again(folder: Path, tmp_path: Path) -> None:
    again = repack(folder / "pairs", tmp_path / "wide", 512, workers=1)
    assert again.has_pairs
    assert sum(shard.targets for shard in again.shards) == sum(shard.targets for shard in read_manifest(folder / "pairs").shards)
    with pytest.raises(ConfigError, match="a pair cannot be cut"):
        repack(folder / "pairs", tmp_path / "narrow", 64, workers=1)


BAD = [
    ("messages-malformed", {"prompt": "x", "chosen": "a", "rejected": 3}),
    ("messages-malformed", {"prompt": "", "chosen": "a", "rejected": "b"}),
    ("messages-malformed", {"prompt": "x", "chosen": [], "rejected": "b"}),
    ("no-answer", {"prompt": "x", "chosen": " ", "rejected": "b"}),
    ("no-answer", {"prompt": "x", "chosen": [{"role": "user", "content": "x"}], "rejected": "b"}),
    ("equal-pair", {"prompt": "x", "chosen": "a", "rejected": "a"}),
    ("unknown-role", {"prompt": [{"role": "you", "content": "x"}], "chosen": "a", "rejected": "b"}),
    ("no-text-field", {"prompt": "x", "chosen": "a"}),
]


def test_pairs_that_cannot_be_used_are_rejected_with_a_counted_reason(tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in (*pair_records(30), *(record for _, record in BAD))]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    too_long = {"prompt": "x" * 200, "chosen": "a", "rejected": "b"}
    (tmp_path / "more.jsonl").write_text(json.dumps(too_long))
    paths = (str(tmp_path / "some.jsonl"), str(tmp_path / "more.jsonl"))
    directory = write_pairs(tmp_path, sources=paths, limits={"max_rejected_fraction": 0.5})
    counts = {reason: [one for one, _ in BAD].count(reason) for reason, _ in BAD}
    rejected = read_manifest(directory).totals["rejected"]
    assert rejected["read"] == counts
    assert rejected["quality"] == {"too-many-tokens": 1}


def test_a_pair_whose_answers_have_the_same_ids_is_counted_and_not_kept(tmp_path: Path) -> None:
    library = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(ByteLevel.alphabet())}, []))
    library.normalizer, library.pre_tokenizer = Lowercase(), ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    differing = {"prompt": "Say it.", "chosen": "Yes, a cat.", "rejected": "yes, a CAT."}
    records = [*pair_records(30), differing, {"prompt": "x" * 300, "chosen": "A", "rejected": "a"}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    directory = write_pairs(tmp_path, sources=(str(tmp_path / "some.jsonl"),), tokenizer={"path": tmp_path / "tokenizer.json"})
    totals = read_manifest(directory).totals
    assert totals["rejected"]["quality"] == {"equal-ids": 1, "too-many-tokens": 1}
    assert totals["documents"]["kept"] == 30


def test_pairs_may_be_messages_or_repeat_their_prompt(folder: Path, tmp_path: Path) -> None:
    records = []
    for number, one in enumerate(pair_records(60)):
        prompt = [{"role": "user", "content": one["prompt"]}]
        before = prompt if number % 2 else []
        answers = {name: [*before, {"role": "assistant", "content": one[name]}] for name in ("chosen", "rejected")}
        records.append({"prompt": prompt if number % 3 else one["prompt"], **answers})
    (tmp_path / "messages.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    directory = write_pairs(tmp_path, sources=(str(tmp_path / "messages.jsonl"),))
    shards = [shard.sha256 for shard in read_manifest(directory).shards]
    assert shards == [shard.sha256 for shard in read_manifest(folder / "pairs").shards]
