"""The process that starts the ranks counts the GPUs if it must, and hands the settings to the ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer.distributed import devices
from trainer.launch import torchrun
from trainer.launch.train_settings import SETTINGS_VARIABLE, hand_to_ranks, handed_settings, load_train_settings

WORDS = ["--data", "data", "--run", "run", "--limits.tokens", "1000", "--optim.lr", "3e-4", "--batch.micro_batch_size", "2"]


@pytest.mark.parametrize(("device", "signs"), [("cpu", True), ("auto", False)])
def test_torch_is_not_loaded_to_count_where_no_gpu_can_be_used(
    device: str, signs: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "signs_of_gpus", lambda: ["/dev/nvidia0"] * signs)
    assert torchrun.count_gpus(device) == 0
    assert capfd.readouterr().err == ""


def test_the_number_is_what_torch_says(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torchrun, "signs_of_gpus", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(devices, "num_gpus", lambda device: {"cuda": 2}[device])
    assert torchrun.count_gpus("cuda") == 2
    assert capfd.readouterr().err.startswith("train: counting the GPUs")


def test_a_rank_has_the_settings_of_the_launcher_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, "")
    assert handed_settings(WORDS) is None
    config = load_train_settings(WORDS)
    hand_to_ranks(config, WORDS, tmp_path / "settings.json")
    assert os.environ[SETTINGS_VARIABLE] == str(tmp_path / "settings.json")
    handed = handed_settings(WORDS)
    assert handed == config
    assert handed is not None
    assert [part.model_fields_set for part in (handed.batch, handed.optim, handed.limits, handed.eval)] == [
        {"micro_batch_size"},
        {"lr"},
        {"tokens"},
        set(),
    ]


def test_a_training_with_other_arguments_parses_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, "")
    hand_to_ranks(load_train_settings(WORDS), WORDS, tmp_path / "settings.json")
    assert json.loads((tmp_path / "settings.json").read_text())["arguments"] == WORDS
    assert handed_settings([*WORDS, "--seed", "5"]) is None


@pytest.mark.parametrize(
    ("ranks", "nodes", "known"),
    [("2", None, True), ("2", "3", True), ("auto", "1", False), ("gpu", "", False), ("2", "1:3", False)],
)
def test_settings_are_handed_over_only_if_the_number_of_ranks_is_known(ranks: str, nodes: str | None, known: bool) -> None:
    variables = {"PET_NPROC_PER_NODE": ranks} | ({} if nodes is None else {"PET_NNODES": nodes})
    assert torchrun.knows_ranks(variables) is known
