"""The words behind `entrypoints/train` become one command."""

from __future__ import annotations

import sys

import pytest

from trainer.launch.command import COMMANDS, folder_of, group_command, other_command, training_arguments

TRAININGS = [
    ([], []),
    (["train"], []),
    (["--limits.steps", "5"], ["--limits.steps", "5"]),
    (["train", "--run", "r"], ["--run", "r"]),
]


@pytest.mark.parametrize(("words", "arguments"), TRAININGS)
def test_a_training_is_what_is_wanted_without_another_word(words: list[str], arguments: list[str]) -> None:
    assert other_command(words) is None
    assert training_arguments(words) == arguments


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train"}))
def test_another_command_of_the_trainer_runs_in_one_process(command: str) -> None:
    assert other_command([command, "--help", "x"]) == [sys.executable, "-m", "trainer", command, "--help", "x"]


@pytest.mark.parametrize("words", [["--help"], ["train", "-h"], ["--limits.steps", "5", "--help"]])
def test_help_about_training_is_printed_once_and_not_by_every_rank(words: list[str]) -> None:
    assert other_command(words) == [sys.executable, "-m", "trainer", "train", "--help"]


def test_anything_else_is_a_program() -> None:
    assert other_command(["echo", "a  b", "--help"]) == ["echo", "a  b", "--help"]


def test_options_reach_the_ranks_as_they_are() -> None:
    assert group_command(["--eval.prompt", "two words", ""])[-6:] == ["-m", "trainer", "train", "--eval.prompt", "two words", ""]


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "from the variable"),
        (["--run", "a b"], "a b"),
        (["--run=a=b"], "a=b"),
        (["--run=a", "--limits.steps", "5", "--run", "c"], "c"),
        (["--run", "a", "--run="], ""),
        (["--runs", "a", "--run.x=y"], "from the variable"),
        (["--limits.steps", "5", "--run"], "from the variable"),
    ],
)
def test_an_option_names_the_folder_and_the_last_one_counts(arguments: list[str], folder: str) -> None:
    assert folder_of("run", arguments, {"TRAIN_RUN": "from the variable", "TRAIN_DATA": "d"}) == folder
    assert folder_of("data", arguments, {}) == ""
