"""The settings of a training: parsed once on a node, before torch is loaded, and handed to its ranks as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from common.command_line import PROGRAM
from common.settings.load import load_settings
from common.settings.model import keep_set, set_names
from common.settings.options import help_parser
from trainer.config import TrainConfig

SETTINGS_VARIABLE = "TRAINER_SETTINGS_FILE"  # path of the file, in a folder that only this user can open


def load_train_settings(arguments: Sequence[str]) -> TrainConfig:
    return load_settings(TrainConfig, arguments, help_parser(TrainConfig, f"{PROGRAM} train", ""))


def hand_to_ranks(config: TrainConfig, arguments: Sequence[str], path: Path) -> None:
    handed = {"arguments": list(arguments), "given": list(set_names(config)), "settings": config.model_dump(mode="json")}
    path.write_text(json.dumps(handed))
    os.environ[SETTINGS_VARIABLE] = str(path)


def handed_settings(arguments: Sequence[str]) -> TrainConfig | None:
    """Return the settings that `hand_to_ranks` has written; None for other arguments, or if torchrun was started by hand."""
    if not (path := os.environ.get(SETTINGS_VARIABLE)):
        return None
    handed = json.loads(Path(path).read_text())
    if handed["arguments"] != list(arguments):  # a training that a rank starts
        return None
    config = TrainConfig.model_validate(handed["settings"])
    keep_set(config, handed["given"])
    return config
