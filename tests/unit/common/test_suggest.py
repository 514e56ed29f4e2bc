"""Names that users guess lead to settings that exist."""

import argparse
from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.load import load_options, load_settings
from common.settings.markers import AlsoCalled
from common.settings.model import Options, Settings, environment_names, markers_of, setting_names
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig
from trainer.commands.generate import GenerateOptions
from trainer.config import TrainConfig

MODELS: dict[str, type[Settings] | type[Options]] = {"train": TrainConfig, "prepare": PrepareConfig, "generate": GenerateOptions}
PARSERS = {command: help_parser(model, command, "") for command, model in MODELS.items()}


def refused(command: str, *arguments: str, **environment: str) -> str:
    """Return the error message for the arguments."""
    model, parser = MODELS[command], PARSERS[command]
    load: Any = load_options if issubclass(model, Options) else load_settings
    with pytest.raises(ConfigError) as caught:
        load(model, arguments, parser, environment)
    return str(caught.value)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_setting_is_not_called_like_another_setting(model: type[Settings] | type[Options]) -> None:
    called = {name: also.names.split() for name, also in markers_of(model, AlsoCalled).items()}
    assert called
    assert not {name for names in called.values() for name in names} & set(setting_names(model))
    assert all(len(set(names)) == len(names) for names in called.values())


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("train", "--lr", "--optim.lr"),
        ("train", "--learning_rate", "--optim.lr"),
        ("train", "--optim.learning_rate", "--optim.lr"),
        ("train", "--Optim-LR", "--optim.lr"),
        ("train", "--steps", "--limits.steps"),
        ("train", "--max_steps", "--limits.steps"),
        ("train", "--epochs", "--limits.epochs"),
        ("train", "--batch_size", "--batch.global_batch_size or --batch.micro_batch_size"),
        ("train", "--n_layer", "--model.layers"),
        ("train", "--layer", "--model.layers"),
        ("train", "--block_size", "--model.context"),
        ("train", "--max_grad_norm", "--guard.max_grad_norm or --optim.clip_norm"),
        ("train", "--every_steps", "--eval.every_steps, --checkpoint.every_steps or --log.every_steps"),
        ("train", "--eval.steps", "--eval.every_steps or --limits.steps"),
        ("train", "--output_dir", "--run"),
        ("prepare", "--block_size", "--row_length"),
        ("prepare", "--vocab", "--tokenizer.vocab_size"),
        ("prepare", "--seed", "--augment.seed or --split.seed"),
        ("generate", "--max_new_tokens", "--max_tokens"),
        ("generate", "--top-k", "--top_k"),
        ("generate", "--jsn", "--json"),
        ("generate", "--promt", "--prompt"),
    ],
)
def test_a_guessed_name_leads_to_the_setting(command: str, option: str, meant: str) -> None:
    for spelled in {option, option[:2] + option[2:].replace("_", "-")}:
        assert f"; did you mean {meant}? (" in refused(command, spelled, "3")
        assert f"; did you mean {meant}? (" in refused(command, f"{spelled}=3")


def test_several_guessed_names_are_explained_together() -> None:
    message = refused("train", "--lr", "3e-4", "--steps=10", "--nonsense", "1")
    assert "; --lr: did you mean --optim.lr?; --steps=10: did you mean --limits.steps? (all settings" in message


def test_a_setting_of_the_other_program_is_named_with_its_command() -> None:
    assert "; prepare has --tokenizer.vocab_size (" in refused("train", "--vocab_size", "3")
    assert "; train has --model.layers (" in refused("prepare", "--n_layer", "3")


def test_a_name_that_resembles_nothing_has_no_guess() -> None:
    assert "--qqqqq 3 (all settings" in refused("train", "--qqqqq", "3")


def test_guesses_in_the_environment_are_spelled_as_variables() -> None:
    message = refused("train", "--data", "d", "--run", "r", TRAIN_LR="3")
    assert message == "environment: TRAIN_LR is not a setting; did you mean TRAIN_OPTIM__LR?"
    assert "TRAIN_OPTIM__LR" in environment_names(TrainConfig)


def test_guesses_of_parsers_leave_the_help_option_alone() -> None:
    assert isinstance(PARSERS["train"], argparse.ArgumentParser)
    assert "did you mean --help?" in refused("train", "--halp")
