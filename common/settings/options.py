"""The command-line options and the schema of a settings model."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.errors import ConfigError
from common.settings.effects import conditions_of
from common.settings.model import Options, Settings, environment_names, is_list, place_in_recipe, place_of, setting_names, spelling
from common.settings.suggest import suggest
from common.terminal import bar_columns
from common.text import value_text

__all__ = ["SchemaOptions", "SettingText", "help_parser", "option_texts", "schema_text", "setting_texts"]

_SHORT_WIDTH = 80
_WIDTH = 120
"""Columns of a full help, unless the terminal has fewer."""
_DEEP = " " * 6


class SchemaOptions(Options):
    """Prints the JSON Schema of the settings, for editors."""

    env: bool = Field(False, description="Print the names of the environment variables instead, one on each line.")


def help_parser(model: type[Settings] | type[Options], program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with one option for each setting, by section. It raises ConfigError instead of exiting."""
    usage = f"{program} [--SETTING VALUE ...]" if issubclass(model, Settings) else None
    short = issubclass(model, Settings) and bool(model.frequent)
    parser = _Parser(
        prog=program, usage=usage, description=description, formatter_class=_HelpFormatter, allow_abbrev=False, add_help=not short
    )
    parser.model = model
    if short:
        text = "Show the most used settings, with examples; all: show all settings."
        parser.add_argument("-h", "--help", nargs="?", const="", metavar="all", action=_ShortHelp, help=text)
    if issubclass(model, Options):
        for name, field in setting_names(model).items():
            _add_option(parser, name, field)
    else:
        _add_settings(parser, model)
    return parser


def _add_settings(parser: argparse.ArgumentParser, model: type[Settings]) -> None:
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in setting_names(model).items():
        section = name.rpartition(".")[0]
        if section not in groups:
            title = (model.model_fields[section].description or section) if section else "main settings"
            groups[section] = parser.add_argument_group(f"{section}: {title.removesuffix('.')}" if section else title)
        groups[section].add_argument(
            f"--{name}",
            dest=name,
            nargs="+" if is_list(field) else None,
            metavar=_type_name(field.annotation),
            help=_help_text(field, _default_of(field)),
        )


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    place = place_of(field)
    text = _help_text(field, _default_text(field))
    type_name = _type_name(field.annotation)
    if type(None) in typing.get_args(field.annotation):
        type_name = type_name.removesuffix("|none")
    metavar = place.metavar or type_name
    if place.positional:
        count = "+" if is_list(field) else "?" if place.variable or not field.is_required() else None
        parser.add_argument(name, nargs=count, metavar=metavar, help=text)
    elif field.annotation is bool:
        parser.add_argument(spelling(name, field), dest=name, action="store_true", default=None, help=text)
    elif is_list(field):
        parser.add_argument(spelling(name, field), dest=name, action="extend", nargs="+", metavar=metavar, help=text)
    else:
        parser.add_argument(spelling(name, field), dest=name, metavar=metavar, help=text)


@dataclass(frozen=True)
class SettingText:
    name: str
    values: str
    """Its type, or the words that it can be; empty for a flag."""
    bounds: str
    default: str
    """`required`, or empty if the description says what no value means."""
    needs: str
    """Under which conditions it has an effect; empty: always."""
    description: str


def setting_texts(model: type[Settings]) -> list[SettingText]:
    return [_text(name, name, field, _default_of(field)) for name, field in setting_names(model).items()]


def option_texts(model: type[Options]) -> list[SettingText]:
    return [_text(name, spelling(name, field), field, _default_text(field)) for name, field in setting_names(model).items()]


def _text(name: str, shown: str, field: FieldInfo, default: str) -> SettingText:
    flag = shown != name and field.annotation is bool
    return SettingText(
        name=shown,
        values="" if flag else place_of(field).metavar or _type_name(field.annotation),
        bounds=_bounds_of(field),
        default=default.removeprefix("default: "),
        needs=" and ".join(condition.text for condition in conditions_of(field)),
        description=field.description or "",
    )


def schema_text(model: type[Settings], *, env: bool) -> str:
    return "\n".join(environment_names(model)) if env else json.dumps(model.model_json_schema(), indent=2)


def _short_help(model: type[Settings], program: str, description: str) -> str:
    fields = setting_names(model)
    head = [f"usage: {program} [--SETTING VALUE ...]", "", *textwrap.wrap(description, _SHORT_WIDTH), ""]
    lines = [*head, "Settings that people change most:"]
    for name, example in model.frequent.items():
        facts = "" if fields[name].default is None else _default_of(fields[name])
        text = f"{fields[name].description}{f' [{facts}]' if facts else ''}"
        lines.append(f"  --{name} {example}")
        lines += textwrap.wrap(text, _SHORT_WIDTH, initial_indent=_DEEP, subsequent_indent=_DEEP)
    lines += ["", "Examples:", *(f"  {program} {words}" for words in model.examples), ""]
    prefix, table = model.environment_prefix, model.recipe_table
    name = next(name for name in model.frequent if "." in name)
    section, _, last = name.rpartition(".")
    lines += [
        f"All settings:  {program} --help all",
        f"In a recipe:   [{table}.{section}] {last} = {model.frequent[name]}",
        f"As a variable: {prefix}{name.replace('.', '__').upper()}={model.frequent[name]}",
    ]
    return "\n".join(lines) + "\n"


def _default_of(field: FieldInfo) -> str:
    return "required" if field.default is PydanticUndefined else f"default: {_shown(field.default)}"


class _ShortHelp(argparse.Action):
    """`--help` prints the short help, `--help all` every setting."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> NoReturn:
        if values not in ("", "all"):
            parser.error(f"--help {values}: the only value is all")
        if values == "all" or not isinstance(parser, _Parser) or not issubclass(parser.model, Settings):
            parser.print_help()
        else:
            sys.stdout.write(_short_help(parser.model, parser.prog, parser.description or ""))
        parser.exit()


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = bar_columns(sys.stdout) if sys.stdout.isatty() else _WIDTH
        narrow = columns < _WIDTH
        super().__init__(prog, max_help_position=24 if narrow else 36, width=columns if narrow else _WIDTH)


class _Parser(argparse.ArgumentParser):
    model: type[Settings] | type[Options]

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        if issubclass(self.model, Settings) and (place := place_in_recipe(self.model, unknown.removeprefix("--"))):
            raise ConfigError(f"{self.prog}: {unknown}: only a recipe can hold it: {place}")
        kind = "settings" if issubclass(self.model, Settings) else "options"
        raise ConfigError(f"{self.prog}: {message}{self._suggestions(message)} (all {kind}: {self.prog} --help)")

    def _suggestions(self, message: str) -> str:
        words = message.removeprefix("unrecognized arguments: ").split() if "unrecognized" in message else []
        known = {option.strip("-").replace("-", "_"): option for action in self._actions for option in action.option_strings}
        options = [word for word in words if word.startswith("--")]
        if len(options) < 2:
            return suggest(words[0], known) if words else ""
        return "".join(f"; {word}: {found.removeprefix('; ')}" for word in options if (found := suggest(word, known)))


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


def _default_text(field: FieldInfo) -> str:
    place = place_of(field)
    if place.variable:
        return f"default: ${place.variable}"
    if field.is_required():
        return "" if place.positional else "required"
    return "" if field.default in (None, ()) or field.default is False else f"default: {_shown(field.default)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "empty"
    if isinstance(value, str) and not value.isprintable():
        return f"${value!r}"  # how bash writes a line end
    return value_text(value) or "empty"


def _bounds_of(field: FieldInfo) -> str:
    return ", ".join(
        f"{sign} {getattr(item, attribute)}"
        for item in field.metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(item, attribute)
    )


def _help_text(field: FieldInfo, default: str) -> str:
    needs = (f"needs {condition.text}" for condition in conditions_of(field))
    facts = "; ".join(filter(None, (_bounds_of(field), default, *needs)))
    return f"{field.description}{f' [{facts}]' if facts else ''}".replace("%", "%%")
