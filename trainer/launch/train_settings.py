"""Loads the settings of a training, before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from common.command_line import PROGRAM
from common.settings.load import load_settings
from common.settings.options import help_parser
from trainer.config import TrainConfig

__all__ = ["load_train_settings"]


def load_train_settings(arguments: Sequence[str]) -> TrainConfig:
    """Return the settings of `train` with these arguments.

    Raises:
        ConfigError: a setting is unknown or its value is not allowed.
    """
    return load_settings(TrainConfig, arguments, help_parser(TrainConfig, f"{PROGRAM} train", ""))
