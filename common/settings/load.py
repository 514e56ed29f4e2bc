"""Loads one frozen settings model from the command line, the environment, a TOML recipe and its defaults, in this order."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import UnusableFileError, read_input
from common.paths import RECIPES
from common.redaction import HIDDEN, redacted_repr
from common.settings.dotted import flatten, merge, nest, parse_toml, without
from common.settings.markers import ASKED_AGAIN, NAMES_SETTINGS, PER_START
from common.settings.messages import explain, explain_details, nearest, suggest
from common.settings.model import (
    PROGRAMS,
    OptionsT,
    Settings,
    SettingsT,
    current_names,
    environment_names,
    former_variables,
    is_list,
    keep_set,
    none_word,
    place_in_recipe,
    place_of,
    setting_names,
    settings_with,
    user_tables,
    with_current_names,
    with_nones,
)

_log = logging.getLogger(__name__)

AUTO = "auto"  # its settings are chosen for the data and the machine
MAX_SETTINGS_BYTES = 1 << 20


def load_settings(
    model: type[SettingsT], arguments: Sequence[str], parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ
) -> SettingsT:
    """`model_fields_set` of the result has what a person has set."""
    fields = setting_names(model)
    _check_utf8("command line", arguments)
    given = {name: value for name, value in vars(parser.parse_args(_current(model, arguments))).items() if value is not None}
    return _assembled(model, nest({name: none_word(fields[name], value) for name, value in given.items()}), environment)


def load_values(model: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Return the settings that a program gives, as tables or by dotted names. They mean what they mean on a command line."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        part = nest({name: _plain(value)})
        if twice := sorted(flatten(given).keys() & flatten(part).keys()):
            raise ConfigError(f"{twice[0]} is given twice, in a table and by its full name; remove one of them")
        merge(given, part)
    try:
        current = with_nones(model, with_current_names(model, given))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    flat, now = flatten(current), current_names(model)
    for former in flatten(given):
        _renamed(former, now)
    for name, field in setting_names(model).items():
        if is_list(field) and isinstance(flat.get(name), str):
            merge(current, nest({name: (flat[name],)}))
    try:
        model.model_validate(current)  # first, because the choices below need values of the right type
    except ValidationError as error:
        if wrong := [one for one in error.errors() if one["type"] not in ("missing", "value_error")]:
            raise ConfigError(explain_details(model, wrong)) from None
    return _assembled(model, current, {})


def _plain(value: Any) -> Any:
    """Return a value of a program as a command line or a recipe gives it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, bool):
        return str(value).lower()  # it is not a number
    if isinstance(value, str | os.PathLike):
        _check_utf8("settings", [text := os.fspath(value)])
        return text
    if isinstance(value, list | tuple | set | frozenset | Iterator):
        return tuple(map(_plain, value))
    return value.item() if getattr(value, "shape", None) == () else value  # a number of NumPy or torch


def _assembled(model: type[SettingsT], given_here: dict[str, Any], environment: Mapping[str, str]) -> SettingsT:
    variables = _from_environment(model, environment)
    recipe = given_here.get("recipe", variables.get("recipe", model.model_fields["recipe"].default))
    own = [variables, given_here]
    resolver: Any = import_module(model.resolver) if model.resolver else None
    of_person = own
    if resolver and (path := resolver.recorded_in({name: value for layer in own for name, value in layer.items()})) is not None:
        layers = [_recorded(model, path, own), *own]
    else:
        base = {} if recipe == AUTO else _from_recipe(model, recipe)
        if recipe not in (None, AUTO) and recipe_path(recipe).parent.resolve() != RECIPES.resolve():
            of_person = [base, *own]
        inherited = resolver.inherited(_by_name([base, *own])) if resolver else {}
        base = nest((resolver or model).chosen(inherited | _by_name(own))) if recipe == AUTO else base
        layers = [base, nest(inherited), *own]
    given_names = {name for layer in of_person for name in flatten(layer)}
    layers.append(nest(model.adapted(_by_name(layers), given_names)))
    merged: dict[str, Any] = {}
    for layer in layers:
        merge(merged, layer)
    names, given = current_names(model), flatten(merged)
    for name in settings_with(model, NAMES_SETTINGS):
        if isinstance(listed := given.get(name), list | tuple):
            merge(merged, nest({name: [_renamed(one, names) for one in listed]}))
    try:
        config = model(**merged)
    except ValidationError as error:
        raise ConfigError(explain(model, error)) from None
    keep_set(config, given_names)
    return config


def _recorded(model: type[Settings], path: Path, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that an earlier start has recorded, without those that hold for one start alone."""
    values = _from_recipe(model, str(path), is_of_run=True)
    given = {name for layer in own for name in flatten(layer)}
    recorded = flatten(values)
    asked = [name for name in settings_with(model, ASKED_AGAIN) if name not in given]
    if missing := {name: recorded[name] for name in asked if recorded.get(name)}:
        options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in missing.items())
        raise ConfigError(
            f"{path}: the run was started with {', '.join(missing)}, which a file of the run cannot decide; "
            f"add {options}, or none to leave it out"
        )
    return without(values, settings_with(model, PER_START))


def _by_name(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value or None for layer in layers for name, value in flatten(layer).items()}


def _current(model: type[Settings], arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the names that settings have now."""
    words, names = [], current_names(model)
    for word in arguments:
        option, equals, value = word.partition("=")
        words.append(f"--{_renamed(option[2:], names)}{equals}{value}" if option.startswith("--") else word)
    return words


def _renamed(name: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(name, str) or name not in names:
        return name
    warn_of_former_name(name, names[name])
    return names[name]


def load_options(
    model: type[OptionsT], arguments: Sequence[str], parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ
) -> OptionsT:
    fields = setting_names(model)
    # Options may stand between values without an option. Python 3.11 does not keep the meaning of `--` there.
    parse = parser.parse_args if "--" in arguments else parser.parse_intermixed_args
    given = {name: none_word(fields[name], value) for name, value in vars(parse(arguments)).items() if value is not None}
    variables = {name: variable for name, field in fields.items() if (variable := place_of(field).variable)}
    found = {name: value for name, variable in variables.items() if (value := environment.get(variable))}
    try:
        return model(**nest(found | given))
    except ValidationError as error:
        raise ConfigError(explain(model, error)) from None


def _from_environment(model: type[Settings], environment: Mapping[str, str]) -> dict[str, Any]:
    known = dict(zip(environment_names(model), setting_names(model).items(), strict=True))
    variables = {name: variable for variable, (name, _) in known.items()}
    former = former_variables(model)
    flat: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(model.environment_prefix) or not value:
            continue
        _check_utf8("environment", (variable, value))
        dotted = variable.removeprefix(model.environment_prefix).replace("__", ".").lower()
        if place := place_in_recipe(model, dotted):
            raise ConfigError(f"environment: {variable}: only a recipe can hold it: {place}")
        if variable in former:
            if environment.get(former[variable]):
                raise ConfigError(
                    f"environment: {variable} is the former name of {former[variable]}, and both are set; remove {variable}"
                )
            variable = _renamed(variable, former)  # noqa: PLW2901
        if variable not in known:
            raise ConfigError(f"environment: {variable} is not a setting{suggest(dotted, variables, model)}")
        name, field = known[variable]
        try:
            flat[name] = json.loads(value) if is_list(field) else none_word(field, value)
        except json.JSONDecodeError:
            shown = repr(HIDDEN if "://" in value else value)  # a broken list cannot be searched for secrets
            raise ConfigError(f'environment: {variable} = {shown} is not a JSON list; write for example ["a", "b"]') from None
    return nest(flat)


def _check_utf8(origin: str, words: Iterable[str]) -> None:
    """Raise ConfigError if a word is not UTF-8. Python decodes it to lone surrogates, which no file in UTF-8 can hold."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{origin}: {redacted_repr(word)} is no UTF-8 text; write it in UTF-8, and rename a file of that name; "
                "or set PYTHONUTF8=1, if it is UTF-8 and the locale is another"
            ) from None


def recipe_path(recipe: str) -> Path:
    """Return the file of a recipe, which is a name in `env/recipes` or the path of a .toml file."""
    return Path(recipe) if recipe.endswith(".toml") or "/" in recipe else RECIPES / f"{recipe}.toml"


def _from_recipe(model: type[Settings], recipe: str | None, *, is_of_run: bool = False) -> dict[str, Any]:
    if recipe is None:
        return {}
    path = recipe_path(recipe)
    try:
        tables = parse_toml(read_input(path, MAX_SETTINGS_BYTES))
    except UnusableFileError as error:
        raise ConfigError(f"recipe {recipe!r}: {error}; name a .toml file") from None
    except (FileNotFoundError, NotADirectoryError):
        names = sorted((AUTO, *(file.stem for file in RECIPES.glob("*.toml"))))
        raise ConfigError(
            f"recipe {recipe!r}: no file {path}; the recipes are {', '.join(names)}; name one of them, or a .toml file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"recipe {path}: not valid TOML: {error}") from None
    for table, value in tables.items():
        if table not in PROGRAMS:
            raise ConfigError(f"recipe {path}: unknown table [{table}]{nearest(table, list(PROGRAMS))}; use [prepare] and [train]")
        if not isinstance(value, dict):
            raise ConfigError(f"recipe {path}: {table} = {value!r} is not a table; write [{table}] and its settings below")
    written = tables.get(model.recipe_table, {})
    try:
        values = with_current_names(model, written)
    except ValueError as error:
        raise ConfigError(f"recipe {path}: {error}") from None
    known = list(setting_names(model))
    tables_of_users = tuple(f"{name}." for name in user_tables(model))
    for name in flatten(values):
        if name not in known and not name.startswith(tables_of_users):
            table = f"{model.recipe_table}.{name}"
            raise ConfigError(f"recipe {path}: {table} is not a setting{suggest(name, {one: one for one in known}, model)}")
    if not is_of_run:  # nobody can change a name in the settings that a run has recorded
        now = current_names(model)
        for former in flatten(written):
            _renamed(former, now)
    return with_nones(model, values)


def warn_of_former_name(former: str, name: str) -> None:
    _log.warning("%s is called %s now; use the new name", former, name)
