"""The shape of the model of a run that begins with the weights of another run: it comes from the settings of that run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import CheckpointError
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.markers import FITS_WEIGHTS, FixesShapes
from common.settings.model import markers_of, settings_with
from common.settings.toml import parse_toml
from common.untrusted import read_run_file
from trainer.config.model import ModelConfig
from trainer.config.not_a_run import not_a_run

__all__ = ["differing_shape", "initial_model"]


def initial_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model that a run takes from the run `init`, by their dotted names.

    The shape is that of the other run. The context is at least as long, and the base of the rotary embedding the same if it is not
    given. All other settings of the model may differ. If the other run was removed, the settings that this run has recorded decide.

    Raises:
        CheckpointError: there is no such run, or its settings are damaged.
    """
    folders = [Path(given["init"]), *([Path(given["run"])] if given.get("run") is not None else [])]
    found = next((folder for folder in folders if (folder / "config.toml").is_file()), None)
    if found is None:
        raise CheckpointError(f"init = {not_a_run(folders[0], 'config.toml')}")
    model = _recorded_model(found)
    settings = {f"model.{name}": getattr(model, name) for name in _shape()}
    settings["model.context"] = max(model.context, _number(given.get("model.context")))
    if "model.rope_theta" not in given:
        settings["model.rope_theta"] = model.rope_theta
    return settings


def differing_shape(model: ModelConfig, initial: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings whose values the weights of the other run do not fit: by their names, the value and that of the run."""
    values = {f"model.{name}": (getattr(model, what), getattr(initial, what)) for name, what in _shape().items()}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _shape() -> dict[str, str]:
    """Return the settings that must be those of the other run, each with the attribute that has the value or its resolved form."""
    fixed = markers_of(ModelConfig, FixesShapes)
    return {name: marker.resolved or name for name, marker in fixed.items()} | {
        name: name for name in settings_with(ModelConfig, FITS_WEIGHTS)
    }


def _recorded_model(run: Path) -> ModelConfig:
    path = run / "config.toml"
    try:
        return ModelConfig.model_validate(parse_toml(read_run_file(path, MAX_SETTINGS_BYTES, run))["train"]["model"])
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: the settings of the model cannot be read ({str(error).splitlines()[0]}); restore the file from a copy"
        ) from None


def _number(value: object) -> int:
    """Return a setting as a number; 0 for one that cannot be meant, which the validation of all settings reports."""
    with suppress(ValueError, TypeError):
        return int(str(value))
    return 0
