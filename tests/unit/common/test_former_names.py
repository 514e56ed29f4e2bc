"""Names that settings had in earlier versions are accepted everywhere, each with one line of warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings.load import load_settings
from common.settings.markers import Formerly
from common.settings.model import current_names, former_variables, markers_of, setting_names
from common.settings.options import help_parser, schema_text
from trainer.config import TrainConfig

FORMER = current_names(TrainConfig)
VALUES = {"batch.micro": 4, "batch.global_rows": 16, "eval.micro": 3, "schedule.floor": 0.2, "loss.normalise": "sequences"} | {
    "bad_data.policy": "quarantine",
    "bad_data.max_share": 0.5,
}
PARSER = help_parser(TrainConfig, "train", "")


def load(*words: str, **environment: str) -> TrainConfig:
    return load_settings(TrainConfig, ["--data", "data", "--run", "no-run", "--limits.steps", "1", *words], PARSER, environment)


def value_of(config: TrainConfig, name: str) -> object:
    section, _, last = name.rpartition(".")
    return getattr(getattr(config, section), last)


def recipe_with(folder: Path, lines: str) -> str:
    (folder / "recipe.toml").write_text(lines)
    return str(folder / "recipe.toml")


def test_a_former_name_is_no_name_of_today() -> None:
    assert VALUES.keys() == FORMER.keys()
    assert len(FORMER) == len(markers_of(TrainConfig, Formerly))
    assert not FORMER.keys() & setting_names(TrainConfig).keys()


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_sets_the_setting_with_one_warning(former: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value, name = VALUES[former], FORMER[former]
    section, _, last = former.rpartition(".")
    variable = f"TRAIN_{section.upper()}__{last.upper()}"
    written = recipe_with(tmp_path, f"[train.{section}]\n{last} = {value!r}\n")
    for words, environment in (
        ((f"--{former}", str(value)), {}),
        ((f"--{former}={value}",), {}),
        (("--recipe", written), {}),
        ((), {variable: str(value)}),
    ):
        assert value_of(load(*words, **environment), name) == value
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert " is called " in record.message
        assert name.rpartition(".")[2].lower() in record.message.lower()
        caplog.clear()
    assert variable in schema_text(TrainConfig, env=True).splitlines()
    assert former_variables(TrainConfig)[variable] in schema_text(TrainConfig, env=True).splitlines()


def test_a_change_is_allowed_by_its_former_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = recipe_with(tmp_path, '[train.resume]\nallow_changes = ["batch.micro", "threads"]\n')
    for config in (
        load("--resume.allow_changes", "batch.micro", "threads"),
        load("--recipe", written),
        load(TRAIN_RESUME__ALLOW_CHANGES='["batch.micro", "threads"]'),
    ):
        assert config.resume.allow_changes == ("batch.micro_batch_size", "threads")
    assert caplog.messages == ["batch.micro is called batch.micro_batch_size now; use the new name"] * 3


def test_a_former_name_as_a_text_stays_a_text(caplog: pytest.LogCaptureFixture) -> None:
    assert load("--eval.prompts", "batch.micro").eval.prompts == ("batch.micro",)
    assert not caplog.records


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    written = recipe_with(tmp_path, "[train.batch]\nmicro = 4\nmicro_batch_size = 8\n")
    with pytest.raises(ConfigError, match=r"recipe .*: batch.micro is the former name of batch.micro_batch_size, and both are set"):
        load("--recipe", written)
    message = "environment: TRAIN_BATCH__MICRO is the former name of TRAIN_BATCH__MICRO_BATCH_SIZE, and both are set; remove TRAIN_"
    with pytest.raises(ConfigError, match=message):
        load(TRAIN_BATCH__MICRO_BATCH_SIZE="8", TRAIN_BATCH__MICRO="4")


def test_the_help_shows_the_names_of_today_alone() -> None:
    assert not [former for former in FORMER if f"--{former} " in PARSER.format_help()]
