"""A student learns from a teacher in the ordinary loop, with the same bits after a resume and on more ranks, and replays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from common.errors import CheckpointError, ConfigError
from data_pipeline.tokenizer import CharacterTokenizer, save_tokenizer
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, start_ranks, tiny_config
from trainer import loop
from trainer.checkpoint.store import CheckpointStore
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.config import DistillationConfig, LossConfig, ModelConfig, TrainConfig
from trainer.data.batch import IGNORE
from trainer.finetuning.distillation import distillation_sums
from trainer.loop import train
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model
from trainer.model.forward import PassInputs
from trainer.verification.replay import replay_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data and a trained teacher that is wider than its students."""
    folder = tmp_path_factory.mktemp("distillation")
    write_prepared(folder / "data")
    train(tiny_config(folder / "data", folder / "teacher", model={"width": 64, "heads": 4}, limits={"steps": 20}))
    return folder


def student(folder: Path, run: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {"objective": "distillation", "teacher": folder / "teacher", "limits": {"steps": 8}}
    return tiny_config(folder / "data", run, **settings | {"schedule": {"decay_steps": 8}} | changes)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    train(student(folder, folder / "whole"))
    return folder / "whole"


def test_the_sums_are_those_of_the_formula() -> None:
    vocab_size, generator = 11, torch.Generator().manual_seed(0)
    small = build_model(ModelConfig(layers=1, width=8, heads=2, vocab_multiple=16), vocab_size, 1).eval()
    large = build_model(ModelConfig(layers=2, width=16, heads=2, vocab_multiple=8), vocab_size, 2).eval()
    tokens_BL = torch.randint(0, vocab_size, (2, 6), generator=generator)
    targets_BL = torch.randint(0, vocab_size, (2, 6), generator=generator)
    targets_BL[0, 3:] = IGNORE
    segments_BL = torch.zeros(2, 6, dtype=torch.int32)
    positions_BL = torch.arange(6).expand(2, 6)
    layout = make_layout(segments_BL, positions_BL, "sdpa", None)
    inputs = PassInputs(tokens_BL, layout, targets_BL, None)
    settings = DistillationConfig(temperature=3.0, mix=0.25)
    found = distillation_sums(small, inputs, teacher=large, vocab_size=vocab_size, loss=LossConfig(), settings=settings)
    own, expected = small(tokens_BL, layout), large(tokens_BL, layout)
    plain = functional.cross_entropy(own.flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORE, reduction="sum")
    log_s = (own[..., :vocab_size] / 3).log_softmax(-1)
    t = (expected[..., :vocab_size] / 3).softmax(-1)
    divergence = (t * (t.log() - log_s)).sum(-1)[targets_BL != IGNORE].sum()
    torch.testing.assert_close(found[1], divergence.detach())
    torch.testing.assert_close(found[0], 0.75 * plain + 0.25 * 9 * divergence)


def test_a_student_comes_closer_to_its_teacher(whole: Path) -> None:
    divergences = [line["measures"]["divergence"] for line in metrics(whole, "train")]
    assert len(divergences) == 8
    assert 0 < divergences[-1] < divergences[0]


def test_a_saved_student_needs_no_teacher(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text().replace(str(folder / "teacher"), str(tmp_path / "gone")))
    found = json.loads(evaluate_run(EvaluateOptions(run=run, as_json=True)))
    assert found["val_loss"] == metrics(whole, "eval")[-1]["val_loss"]


def test_a_resume_and_a_replay_give_the_same_bits(folder: Path, whole: Path, tmp_path: Path) -> None:
    config = student(folder, tmp_path / "run")
    train(config.model_copy(update={"limits": config.limits.model_copy(update={"steps": 4})}))
    train(config)
    assert record_of(tmp_path / "run")["weights"] == record_of(whole)["weights"]
    assert losses(tmp_path / "run") == losses(whole)
    assert not replay_run(whole, 2, train=train, start=0).difference


def test_a_killed_run_continues_to_the_same_bits_with_a_teacher_that_has_moved(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, steps = shutil.copytree(folder / "teacher", tmp_path / "teacher"), list[int]()
    original = loop.train_step

    def stepping(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == 7:
            raise KeyboardInterrupt  # nothing is saved or cleaned up
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stepping)
        with pytest.raises(KeyboardInterrupt):
            train(student(folder, tmp_path / "run", teacher=teacher))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1] == 5
    teacher.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="if the teacher was moved, name its new folder with --teacher"):
        train(student(folder, tmp_path / "run", teacher=teacher))
    train(student(folder, tmp_path / "run", teacher=tmp_path / "moved"))
    assert record_of(tmp_path / "run")["weights"] == record_of(whole)["weights"]
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.long
def test_one_and_two_ranks_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    weights = []
    for num_ranks in (1, 2):
        config = student(folder, tmp_path / str(num_ranks), reproducibility="elastic")
        assert start_ranks(config, num_ranks).wait(timeout=300) == 0
        weights.append((record_of(config.run)["weights"], losses(config.run)))
    assert weights[0] == weights[1]


def test_a_run_cannot_continue_with_another_teacher(folder: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    train(student(folder, tmp_path / "run", teacher=teacher, limits={"steps": 2}))
    shutil.rmtree(teacher)
    train(tiny_config(folder / "data", teacher, limits={"steps": 2}))
    with pytest.raises(ConfigError, match=r"objective\.teacher\.json was sha256:"):
        train(student(folder, tmp_path / "run", teacher=teacher, limits={"steps": 4}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "name its run with --teacher"),
        ({"distillation": {"mix": 0.0}}, "greater than 0"),
    ],
)
def test_a_start_without_a_teacher_or_with_wrong_settings_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        train(student(folder, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "record.json").exists()


def test_a_teacher_with_another_tokenizer_is_refused_with_the_command(folder: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    shutil.rmtree(teacher / "tokenizer")
    save_tokenizer(CharacterTokenizer("abc"), teacher / "tokenizer")
    with pytest.raises(ConfigError, match=rf"prepare the text with `--tokenizer\.path {teacher}`"):
        train(student(folder, tmp_path / "run", teacher=teacher))


def test_the_checkpoint_of_the_teacher_can_be_chosen_and_a_resume_needs_no_other(folder: Path, whole: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    first, *_, last = CheckpointStore(teacher / "checkpoints").steps()
    train(student(folder, tmp_path / "last", teacher=teacher, teacher_checkpoint=str(last)))
    assert losses(tmp_path / "last") == losses(whole)  # the newest one is the default
    chosen = student(folder, tmp_path / "run", teacher=teacher, teacher_checkpoint=str(first))
    train(chosen.model_copy(update={"limits": chosen.limits.model_copy(update={"steps": 4})}))
    assert losses(tmp_path / "run") != losses(whole)[:4]
    for step in CheckpointStore(teacher / "checkpoints").steps()[1:]:
        shutil.rmtree(teacher / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match=f"step-{last:08d}"):
        train(student(folder, tmp_path / "gone", teacher=teacher, teacher_checkpoint=str(last)))
    train(chosen)
    train(student(folder, tmp_path / "again", teacher=teacher, teacher_checkpoint=str(first)))
    assert losses(tmp_path / "run") == losses(tmp_path / "again")
