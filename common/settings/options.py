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
from common.settings.messages import suggest
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
    section_title,
    setting_names,
    spelling,
)
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
        prog=program, usage=usage, description=description, formatter_class=_help_formatter, allow_abbrev=False, add_help=not short
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
            title = section_title(model, section) if section else "main settings"
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
    is_option, texts = issubclass(model, Options), []
    for name, field in setting_names(model).items():
        place = place_of(field)
        says_nothing = is_option and (field.default in (None, ()) or field.default is False)
        if place.variable:
            default = f"${place.variable}"
        elif field.is_required():
            default = "" if place.positional else "required"
        else:
            default = "" if says_nothing else _shown(field.default)
        bounds = [
            f"{sign} {getattr(item, attribute)}"
            for item in field.metadata
            for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
            if hasattr(item, attribute)
        ]
        texts.append(
            SettingText(
                name=spelling(name, field) if is_option else name,
                values="" if is_option and field.annotation is bool else place.metavar or _type_name(field.annotation),
                bounds=", ".join(bounds),
                default=default,
                needs=tuple(condition.text for condition in conditions_of(field)),
                description=field.description or "",
            )
        )
    return texts


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


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    columns = bar_columns(sys.stdout) if sys.stdout.isatty() else _WIDTH
    narrow = columns < _WIDTH
    return argparse.HelpFormatter(prog, max_help_position=24 if narrow else 36, width=columns if narrow else _WIDTH)


class _Parser(argparse.ArgumentParser):
    model: type[Settings] | type[Options]

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split() if "unrecognized" in message else []
        if words and issubclass(self.model, Settings) and (place := place_in_recipe(self.model, words[0].removeprefix("--"))):
            raise ConfigError(f"{self.prog}: {words[0]}: only a recipe can hold it: {place}")
        known = {option.strip("-").replace("-", "_"): option for action in self._actions for option in action.option_strings}
        found = {word: suggest(word, known, self.model) for word in words if word.startswith("--")}
        if len(found) > 1:
            meant = "".join(f"; {word}: {text.removeprefix('; ')}" for word, text in found.items() if text)
        else:
            meant = suggest(words[0], known, self.model) if words else ""
        kind = "settings" if issubclass(self.model, Settings) else "options"
        raise ConfigError(f"{self.prog}: {message}{meant} (all {kind}: {self.prog} --help)")


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


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "empty"
    if isinstance(value, str) and not value.isprintable():
        return f"${value!r}"  # how bash writes a line end
    return value_text(value) or "empty"
