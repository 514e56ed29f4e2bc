"""How the settings of a run differ from its recipe, and those of several runs from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from common.files import read_input
from common.settings.load import MAX_SETTINGS_BYTES, RECIPES
from common.settings.model import setting_names, with_nones
from common.settings.toml import parse_toml
from trainer.config import TrainConfig

__all__ = ["PLACES", "Difference", "Recipe", "differences", "differing", "flat", "recipe_of", "worded"]

PLACES = ("run", "data", "recipe")
"""Settings that say where something is, and not what is done."""


@dataclass(frozen=True)
class Recipe:
    """What a run was to start from: a recipe on top of the defaults, or the defaults alone."""

    name: str | None
    values: Mapping[str, Any]
    """What the recipe sets, by full name; the defaults are not in it."""
    missing: str = ""
    """Why it cannot be read any more, if that is so."""


@dataclass(frozen=True)
class Difference:
    """A setting that is not as the recipe, or where that says nothing the default, has it."""

    name: str
    before: str
    from_recipe: bool
    used: str


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their full names: `{"optim.lr": 0.001, …}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value
    return found


def worded(value: Any) -> str:
    """A setting as it would be written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(worded, value)) or "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    """The recipe that the settings name, as it is now, if it comes with the program or lies below the current folder.

    Whatever is wrong with it is said in `missing`.
    """
    name = config.get("recipe")
    if name is None:
        return Recipe(None, {})
    name = str(name)
    is_path = name.endswith(".toml") or "/" in name
    # The settings may be those of a stranger: a path in them leads to nothing beyond the folder that the user works in.
    below = Path.cwd() if is_path else RECIPES
    path = below / (name if is_path else f"{name}.toml")
    try:
        values = parse_toml(read_input(path, MAX_SETTINGS_BYTES, below=below)).get("train", {})
        if not isinstance(values, Mapping):
            raise ValueError("train is no table")
    except (OSError, ValueError) as error:
        reason = "it is not there any more" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        return Recipe(name, {}, reason)
    return Recipe(name, flat(with_nones(TrainConfig, values)))


def differences(config: Mapping[str, Any], recipe: Recipe) -> list[Difference]:
    """The settings that a run was given otherwise than its recipe and the defaults have them, in the order of their definition."""
    defaults, used = _defaults(), flat(config)
    names = dict.fromkeys((*defaults, *recipe.values, *used))
    return [
        Difference(name, worded(before), name in recipe.values, worded(used.get(name)))
        for name in names
        if name not in PLACES and worded(before := recipe.values.get(name, defaults.get(name))) != worded(used.get(name))
    ]


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The names whose values are not the same everywhere, with the value of each; `none` where one lacks it."""
    names = dict.fromkeys(name for one in settings for name in one)
    values = {name: [worded(one.get(name)) for one in settings] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _defaults() -> dict[str, Any]:
    """Of every setting, None for those that have none."""
    found = {name: setting.get_default(call_default_factory=True) for name, setting in setting_names(TrainConfig).items()}
    return {name: None if value is PydanticUndefined else value for name, value in found.items()}
