"""Differences between the settings of a run and its recipe, and between the settings of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from common.files import read_input
from common.paths import RECIPES
from common.settings.dotted import flatten, parse_toml
from common.settings.load import AUTO, MAX_SETTINGS_BYTES, recipe_path
from common.settings.model import setting_names, with_current_names, with_nones
from trainer.config import TrainConfig
from trainer.config.model import ModelConfig

_PLACES = ("run", "data", "recipe")  # settings that are paths or names of files, and do not change the training
_MAX_WHOLE = 1e15  # whole numbers from here on are written with an exponent


@dataclass(frozen=True)
class Recipe:
    name: str | None
    values: Mapping[str, Any]
    missing: str = ""  # why the recipe cannot be read any more, empty if it can


@dataclass(frozen=True)
class ChangedSetting:
    name: str
    before: str
    from_recipe: bool
    used: str


def set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flatten(values).items() if value is not None}


def worded(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(worded, value)) or "none"
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE:
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    name = config.get("recipe")
    if name in (None, AUTO):  # `auto` has no file
        return Recipe(name, {})
    name = str(name)
    path = Path.cwd() / recipe_path(name)
    below = RECIPES if path.parent == RECIPES else Path.cwd()  # the name is untrusted, and may not lead out of these folders
    try:
        values = parse_toml(read_input(path, MAX_SETTINGS_BYTES, below=below)).get("train", {})
        if not isinstance(values, Mapping):
            raise ValueError("train is not a table")
        values = with_current_names(TrainConfig, dict(values))
    except (OSError, ValueError) as error:
        reason = "the file does not exist any more" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        return Recipe(name, {}, reason)
    return Recipe(name, set_values(with_nones(TrainConfig, values)))


def differences(config: Mapping[str, Any], recipe: Recipe) -> list[ChangedSetting]:
    defaults, used = _defaults(), set_values(config)
    names = dict.fromkeys((*defaults, *recipe.values, *used))
    return [
        ChangedSetting(name, worded(before), name in recipe.values, worded(used.get(name)))
        for name in names
        if name not in _PLACES and worded(before := recipe.values.get(name, defaults.get(name))) != worded(used.get(name))
    ]


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for one in settings for name in one)
    values = {name: [worded(one.get(name)) for one in settings] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def compared_settings(config: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by full name, in a form in which two runs that train alike have equal values.

    A setting has the value of the identity, where the value that the program chose stands in place of none. A setting that the run
    lacks, because it is newer than the run, has its default. Paths of data and run are left out.
    """
    defaults, written = _defaults(), set_values(config)
    settings = defaults | written | {name: value for name, value in identity.items() if name in defaults}
    if name := written.get("recipe"):
        settings["recipe"] = Path.cwd() / recipe_path(str(name))
    if settings.get("extension") and "extension" not in identity:
        settings["extension"] = Path(str(settings["extension"])).resolve()
    try:
        model = ModelConfig.model_validate({name: settings[f"model.{name}"] for name in ModelConfig.model_fields})
    except ValidationError:
        pass  # the settings are not those of a run
    else:
        settings |= {"model.head_dim": model.head_size, "model.kv_heads": model.num_kv_heads, "model.mlp_width": model.mlp_size}
        if settings["optim.kind"] == "muon" and settings["optim.muon_lr"] is None:
            settings["optim.muon_lr"] = settings["optim.lr"]
    return {name: value for name, value in settings.items() if name == "recipe" or name not in _PLACES}


def _defaults() -> dict[str, Any]:
    found = {name: setting.get_default(call_default_factory=True) for name, setting in setting_names(TrainConfig).items()}
    return {name: None if value is PydanticUndefined else value for name, value in found.items()}
