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

from common.errors import ConfigError
from common.settings.model import (
    Options,
    Settings,
    conditions_of,
    environment_names,
    former_variables,
    frequent_settings,
    is_list,
    place_in_recipe,
    place_of,
    setting_names,
    spelling,
)
from common.settings.suggest import suggest
from common.terminal import bar_columns
from common.text import value_text

_SHORT_WIDTH = 80
_WIDTH = 120  # columns of a full help, unless the terminal has fewer
_DEEP = " " * 6


class SchemaOptions(Options):
    """Prints the JSON Schema of the settings, for editors."""

    env: bool = Field(
        False, description="Print the names of the environment variables instead, one on each line, those of earlier versions last."
    )


def help_parser(model: type[Settings] | type[Options], program: str, description: str) -> argparse.ArgumentParser:
    """It raises ConfigError instead of exiting."""
    usage = f"{program} [--SETTING VALUE ...]" if issubclass(model, Settings) else None
    short = issubclass(model, Settings) and bool(frequent_settings(model))
    parser = _Parser(
        prog=program, usage=usage, description=description, formatter_class=_HelpFormatter, allow_abbrev=False, add_help=not short
    )
    parser.model = model
    if short:
        about = "Show the most used settings, with examples; all: show all settings."
        parser.add_argument("-h", "--help", nargs="?", const="", metavar="all", action=_ShortHelp, help=about)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for (name, field), text in zip(setting_names(model).items(), setting_texts(model), strict=True):
        if issubclass(model, Options):
            _add_option(parser, name, field, text)
            continue
        section = name.rpartition(".")[0]
        if section not in groups:
            title = (model.model_fields[section].description or section) if section else "main settings"
            groups[section] = parser.add_argument_group(f"{section}: {title.removesuffix('.')}" if section else title)
        count = "+" if is_list(field) else None
        groups[section].add_argument(f"--{name}", dest=name, nargs=count, metavar=text.values, help=text.help)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo, text: SettingText) -> None:
    place = place_of(field)
    has_none = type(None) in typing.get_args(field.annotation) and not place.metavar
    metavar = text.values.removesuffix("|none") if has_none else text.values
    if place.positional:
        count = "+" if is_list(field) else "?" if place.variable or not field.is_required() else None
        parser.add_argument(name, nargs=count, metavar=metavar, help=text.help)
    elif field.annotation is bool:
        parser.add_argument(text.name, dest=name, action="store_true", default=None, help=text.help)
    elif is_list(field):
        parser.add_argument(text.name, dest=name, action="extend", nargs="+", metavar=metavar, help=text.help)
    else:
        parser.add_argument(text.name, dest=name, metavar=metavar, help=text.help)


@dataclass(frozen=True)
class SettingText:
    name: str
    values: str  # its type, or the words that it can be; empty for a flag
    bounds: str
    default: str  # `required`, or empty if the description says what no value means
    needs: tuple[str, ...]  # the conditions under which it has an effect
    description: str

    @property
    def shown_default(self) -> str:
        return self.default if self.default in ("", "required") else f"default: {self.default}"

    @property
    def help(self) -> str:
        """The text for `argparse`, in which `%` is special."""
        facts = "; ".join(filter(None, (self.bounds, self.shown_default, *(f"needs {one}" for one in self.needs))))
        return f"{self.description}{f' [{facts}]' if facts else ''}".replace("%", "%%")


def setting_texts(model: type[Settings] | type[Options]) -> list[SettingText]:
    is_option = issubclass(model, Options)
    return [
        SettingText(
            name=spelling(name, field) if is_option else name,
            values="" if is_option and field.annotation is bool else place_of(field).metavar or _type_name(field.annotation),
            bounds=_bounds_of(field),
            default=_default_of(field, is_option=is_option),
            needs=tuple(condition.text for condition in conditions_of(field)),
            description=field.description or "",
        )
        for name, field in setting_names(model).items()
    ]


def schema_text(model: type[Settings], *, env: bool) -> str:
    return (
        "\n".join((*environment_names(model), *former_variables(model))) if env else json.dumps(model.model_json_schema(), indent=2)
    )


def _short_help(model: type[Settings], program: str, description: str) -> str:
    texts = {text.name: text for text in setting_texts(model)}
    head = [f"usage: {program} [--SETTING VALUE ...]", "", *textwrap.wrap(description, _SHORT_WIDTH), ""]
    lines = [*head, "Settings that people change most:"]
    frequent = frequent_settings(model)
    for name, example in frequent.items():
        default = texts[name].shown_default
        text = f"{texts[name].description}{f' [{default}]' if default not in ('', 'default: none') else ''}"
        lines.append(f"  --{name} {example}")
        lines += textwrap.wrap(text, _SHORT_WIDTH, initial_indent=_DEEP, subsequent_indent=_DEEP)
    lines += ["", "Examples:", *(f"  {program} {words}" for words in model.examples), ""]
    prefix, table = model.environment_prefix, model.recipe_table
    name = next(name for name in frequent if "." in name)
    section, _, last = name.rpartition(".")
    lines += [
        f"All settings:  {program} --help all",
        f"In a recipe:   [{table}.{section}] {last} = {frequent[name]}",
        f"As a variable: {prefix}{name.replace('.', '__').upper()}={frequent[name]}",
    ]
    return "\n".join(lines) + "\n"


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
            return suggest(words[0], known, self.model) if words else ""
        return "".join(f"; {word}: {found.removeprefix('; ')}" for word in options if (found := suggest(word, known, self.model)))


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


def _default_of(field: FieldInfo, *, is_option: bool) -> str:
    place = place_of(field)
    if place.variable:
        return f"${place.variable}"
    if field.is_required():
        return "" if place.positional else "required"
    says_nothing = is_option and (field.default in (None, ()) or field.default is False)
    return "" if says_nothing else _shown(field.default)


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
