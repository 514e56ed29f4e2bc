"""Loads one frozen settings model from the command line, the environment, a TOML recipe and its defaults, in this order.

Both packages use it, so that `--optim.lr 3e-4`, `TRAIN_OPTIM__LR=3e-4` and `[train.optim] lr = 3e-4` mean the same, and so that a
wrong name or value is refused in the same words wherever it stands.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from data_pipeline.errors import ConfigError
from data_pipeline.files import UnusableFileError, read_input
from data_pipeline.redaction import HIDDEN, redacted_repr

__all__ = [
    "MAX_SETTINGS_BYTES",
    "RECIPES",
    "Section",
    "Settings",
    "environment_names",
    "explain",
    "help_parser",
    "load_settings",
    "parse_toml",
    "schema_text",
    "setting_names",
    "to_toml",
    "with_nones",
]

RECIPES = Path(__file__).resolve().parent.parent / "env" / "recipes"
MAX_SETTINGS_BYTES = 1 << 20
"""The most that a recipe, or the settings of a run, may have."""
_MAX_DOTS = 256
_TOML_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*"|'[^']*'""")


class Section(BaseModel):
    """A group of related settings. All numbers are finite: `to_toml` has no word for others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Settings(Section):
    """All settings of one command. A subclass says where they stand outside the command line."""

    environment_prefix: ClassVar[str]
    """`TRAIN_` makes `TRAIN_OPTIM__LR` the variable for `optim.lr`."""
    recipe_table: ClassVar[str]
    """`train` makes `[train.optim] lr = …` the place in a recipe."""


SettingsT = TypeVar("SettingsT", bound=Settings)


def setting_names(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting of a model with its dotted name: `{"optim.lr": FieldInfo, …}`, in the order of definition.

    Tables with names of the user's own choosing are not among them: only a recipe can hold those.
    """
    names: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if section := _model(field.annotation):
            names |= setting_names(section, f"{prefix}{name}.")
        elif not _is_table(field):
            names[prefix + name] = field
    return names


def environment_names(model: type[Settings]) -> list[str]:
    """The environment variables that set the model's fields: `["TRAIN_OPTIM__LR", …]`."""
    return [model.environment_prefix + name.replace(".", "__").upper() for name in setting_names(model)]


def load_settings(
    model: type[SettingsT],
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    environment: Mapping[str, str] = os.environ,
) -> SettingsT:
    """Builds `model` from command line, environment, recipe and defaults, the first that sets a value winning.

    Raises:
        ConfigError: a name is unknown or a value not allowed; the message says where it was set and what would be.
    """
    fields = setting_names(model)
    _check_utf8("command line", arguments)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    command_line = {name: _none_word(fields[name], value) for name, value in given.items()}
    variables = _from_environment(model, environment)
    recipe = command_line.get("recipe", variables.get("recipe", model.model_fields["recipe"].default))
    layers = [_from_recipe(model, recipe), variables, _nested(command_line)]
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer)
    try:
        return model(**merged)
    except ValidationError as error:
        raise ConfigError(explain(model, error)) from None


def with_nones(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe sets of a model, with None for the word `none` where a setting may be unset; TOML has no word of its own."""
    fields = model.model_fields
    return {name: _with_nones(fields[name], value) if name in fields else value for name, value in values.items()}


def explain(model: type[BaseModel], error: ValidationError, *place: str) -> str:
    """What is wrong with the values of a model, in the user's words; `place` is where the model stands, if it is but a part."""
    return "; ".join(dict.fromkeys(_explain(model, detail, place) for detail in error.errors()))


def help_parser(model: type[Settings], program: str, description: str) -> argparse.ArgumentParser:
    """A command-line parser with one option for each setting, by section; it raises ConfigError where argparse would exit."""
    parser = _Parser(prog=program, description=description, formatter_class=_HelpFormatter, allow_abbrev=False)
    parser.model = model
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in setting_names(model).items():
        section = name.rpartition(".")[0]
        if section not in groups:
            title = (model.model_fields[section].description or section) if section else "main settings"
            groups[section] = parser.add_argument_group(f"{section}: {title}" if section else title)
        groups[section].add_argument(
            f"--{name}",
            dest=name,
            nargs="+" if _is_list(field) else None,
            metavar=_type_name(field.annotation),
            help=_help_text(field),
        )
    return parser


def schema_text(model: type[Settings], program: str, arguments: Sequence[str]) -> str:
    """What a `schema` command prints: the JSON Schema of the settings, or with `--env` their environment variables, one a line."""
    parser = argparse.ArgumentParser(prog=f"{program} schema", description="Prints the JSON Schema of the settings, for editors.")
    parser.add_argument("--env", action="store_true", help="print the names of the environment variables instead, one a line")
    if parser.parse_args(arguments).env:
        return "\n".join(environment_names(model))
    return json.dumps(model.model_json_schema(), indent=2)


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ValueError: it is no TOML, or nothing that settings need: nested too deeply, or with names of more than 256 parts, which
            the parser takes quadratic time for (64,000 parts: 50 s, November 2026).
    """
    text = data.decode("utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS and _TOML_STRING.sub("", line).count(".") > _MAX_DOTS:
            raise ValueError(f"line {number} has more than {_MAX_DOTS} dots outside of texts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def to_toml(table: str, values: Mapping[str, Any]) -> str:
    """Nested plain values as TOML tables under `[table]`; a value of None is left out, as TOML has no word for it."""
    lines = [f"[{table}]"]
    lines += [
        f"{_toml_key(name)} = {_toml_value(value)}"
        for name, value in values.items()
        if not isinstance(value, dict) and value is not None
    ]
    sections = [to_toml(f"{table}.{_toml_key(name)}", value) for name, value in values.items() if isinstance(value, dict)]
    return "\n".join(lines) + "\n" + "".join("\n" + section for section in sections)


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    """JSON, but for characters beyond U+FFFF, where TOML knows no surrogates, and for unseen ones, which TOML forbids in part."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(map(_toml_character, text))


def _toml_character(character: str) -> str:
    code = ord(character)
    return character if character.isprintable() else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)


class _Parser(argparse.ArgumentParser):
    model: type[Settings]

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        if place := _place_in_recipe(self.model, unknown.removeprefix("--")):
            raise ConfigError(f"{self.prog}: {unknown}: only a recipe can hold it: {place}")
        known = [option for action in self._actions for option in action.option_strings]
        raise ConfigError(f"{self.prog}: {message}{_nearest(unknown, known)} (all settings: {self.prog} --help)")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"optim.lr": 1}` as `{"optim": {"lr": 1}}`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, leaf = name.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return nested


def _merge(base: dict[str, Any], update: Mapping[str, Any]) -> None:
    for name, value in update.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = value


def _from_environment(model: type[Settings], environment: Mapping[str, str]) -> dict[str, Any]:
    known = dict(zip(environment_names(model), setting_names(model).items(), strict=True))
    flat: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(model.environment_prefix) or not value:
            continue
        _check_utf8("environment", (variable, value))
        if place := _place_in_recipe(model, variable.removeprefix(model.environment_prefix).replace("__", ".").lower()):
            raise ConfigError(f"environment: {variable}: only a recipe can hold it: {place}")
        if variable not in known:
            raise ConfigError(f"environment: {variable} is no setting{_nearest(variable, list(known))}")
        name, field = known[variable]
        flat[name] = _parse_list(variable, value) if _is_list(field) else _none_word(field, value)
    return _nested(flat)


def _check_utf8(origin: str, words: Iterable[str]) -> None:
    """Raises where a word has other bytes, which Python keeps as lone surrogates: no file that a command writes could hold it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{origin}: {redacted_repr(word)} is no UTF-8 text; write it in UTF-8, and rename a file of that name; "
                "or set PYTHONUTF8=1, if it is UTF-8 and the locale another"
            ) from None


def _parse_list(variable: str, value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        shown = repr(HIDDEN if "://" in value else value)  # what is not even a list cannot be searched for secrets
        raise ConfigError(f'environment: {variable} = {shown} is no JSON list; write for example ["a", "b"]') from None


def _none_word(field: FieldInfo, value: Any) -> Any:
    """The word `none` unsets a setting that may be unset; for any other it is a value like the rest."""
    return None if value == "none" and type(None) in typing.get_args(field.annotation) else value


def _with_nones(field: FieldInfo, value: Any) -> Any:
    if not isinstance(value, dict):
        return _none_word(field, value)
    if section := _model(field.annotation):
        return with_nones(section, value)
    if entry := _entry(field):
        return {name: with_nones(entry, own) if isinstance(own, dict) else own for name, own in value.items()}
    return value


def _model(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation is; None where it is something else."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _entry(field: FieldInfo) -> type[BaseModel] | None:
    """The model of each entry of a table with names of the user's own choosing; None where its entries are plain values."""
    return _model(typing.get_args(field.annotation)[1]) if _is_table(field) else None


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) in (tuple, list)


def _is_table(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def _tables(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The settings that are tables with names of the user's own choosing."""
    for name, field in model.model_fields.items():
        if section := _model(field.annotation):
            yield from _tables(section, f"{prefix}{name}.")
        elif _is_table(field):
            yield prefix + name


def _place_in_recipe(model: type[Settings], name: str) -> str:
    """Where a recipe holds a setting in a table with names of the user's own choosing; nothing for any other setting."""
    table = next((table for table in _tables(model) if f"{name}.".startswith(f"{table}.")), None)
    is_typo = name == table and difflib.get_close_matches(name, list(setting_names(model)), cutoff=0.9)  # `source` for `sources`
    return f"[{model.recipe_table}.{table}]" if table and not is_typo else ""


def _from_recipe(model: type[Settings], recipe: str | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    path = Path(recipe) if recipe.endswith(".toml") or "/" in recipe else RECIPES / f"{recipe}.toml"
    try:
        tables = parse_toml(read_input(path, MAX_SETTINGS_BYTES))
    except UnusableFileError as error:
        raise ConfigError(f"recipe {recipe!r}: {error}; name a .toml file") from None
    except (FileNotFoundError, NotADirectoryError):
        names = sorted(file.stem for file in RECIPES.glob("*.toml"))
        raise ConfigError(f"recipe {recipe!r}: no file {path}; the recipes are {', '.join(names)}, or name a .toml file") from None
    except ValueError as error:
        raise ConfigError(f"recipe {path}: not valid TOML: {error}") from None
    for table, value in tables.items():
        if table not in ("prepare", "train"):
            raise ConfigError(
                f"recipe {path}: unknown table [{table}]{_nearest(table, ['prepare', 'train'])}; use [prepare] and [train]"
            )
        if not isinstance(value, dict):
            raise ConfigError(f"recipe {path}: {table} = {value!r} is no table; write [{table}] and its settings below")
    values: dict[str, Any] = tables.get(model.recipe_table, {})
    known = list(setting_names(model))
    tables_of_users = tuple(f"{name}." for name in _tables(model))
    for name in _flat_names(values):
        if name not in known and not name.startswith(tables_of_users):
            table = f"{model.recipe_table}.{name}"
            raise ConfigError(f"recipe {path}: {table} is no setting{_nearest(name, known)}")
    return with_nones(model, values)


def _flat_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _explain(model: type[BaseModel], detail: ErrorDetails, place: Sequence[str]) -> str:
    names = [part for part in detail["loc"] if isinstance(part, str) and part != "function-after"]
    name = ".".join((*place, *names))
    known = [".".join((*place, one)) for one in (*setting_names(model), *_entry_names(model, names))]
    if detail["type"] == "extra_forbidden":
        return f"{name} is no setting{_nearest(name, known)}"
    if detail["type"] == "missing":
        if isinstance(detail["loc"][-1], int):
            return f"{name} = {redacted_repr(detail['input'])}: too few values"
        return f"{name} is not set; give {_places_of(model, name)}"
    if detail["type"] == "finite_number":
        return f"{name} = {detail['input']!r}: {_finite_wanted(setting_names(model).get('.'.join(names)))}"
    message = detail["msg"].removeprefix("Value error, ")
    found = f" = {redacted_repr(detail['input'])}" if name in known else ""
    return f"{name}{found}: {message[:1].lower()}{message[1:]}" if name else message


def _finite_wanted(field: FieldInfo | None) -> str:
    """What a setting takes that is not finite; its description says how it is switched off, where that can be."""
    if field is None:
        return "input should be a finite number"
    none = " or none" if type(None) in typing.get_args(field.annotation) else ""
    return f"input should be a finite number{none} ({field.description})"


def _entry_names(model: type[BaseModel], names: Sequence[str]) -> list[str]:
    """The settings of an entry of a table with names of the user's own choosing, if these names lead into one."""
    field = model.model_fields.get(names[0]) if len(names) > 1 else None
    entry = _entry(field) if field else None
    return [f"{names[0]}.{names[1]}.{name}" for name in entry.model_fields] if entry else []


def _places_of(model: type[BaseModel], name: str) -> str:
    """Where a setting can be given."""
    known = list(setting_names(model))
    if issubclass(model, Settings) and name in known:
        return f"--{name} or {environment_names(model)[known.index(name)]}"
    return "it in the recipe"


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "|".join(str(argument) for argument in arguments)
    if origin in (types.UnionType, typing.Union):
        return "|".join(_type_name(argument) for argument in arguments)
    if origin in (tuple, list, typing.Annotated):
        return _type_name(arguments[0])
    if annotation is type(None):
        return "none"
    return "PATH" if annotation is Path else str(getattr(annotation, "__name__", annotation))


def _help_text(field: FieldInfo) -> str:
    bounds = ", ".join(
        f"{sign} {getattr(item, attribute)}"
        for item in field.metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(item, attribute)
    )
    default = "required" if field.default is PydanticUndefined else f"default {field.default}"
    return f"{field.description} [{bounds + '; ' if bounds else ''}{default}]".replace("%", "%%")
