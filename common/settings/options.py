"""The command-line options and the schema of a settings model."""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.errors import ConfigError
from common.settings.messages import nearest
from common.settings.model import Settings, environment_names, is_list, place_in_recipe, setting_names

__all__ = ["help_parser", "schema_text"]


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
            nargs="+" if is_list(field) else None,
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


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)


class _Parser(argparse.ArgumentParser):
    model: type[Settings]

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        if place := place_in_recipe(self.model, unknown.removeprefix("--")):
            raise ConfigError(f"{self.prog}: {unknown}: only a recipe can hold it: {place}")
        known = [option for action in self._actions for option in action.option_strings]
        raise ConfigError(f"{self.prog}: {message}{nearest(unknown, known)} (all settings: {self.prog} --help)")


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
