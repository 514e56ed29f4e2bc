"""Runs a command from a table: loads its settings model, fills it, and calls the function that does the work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from common.command_line import Command, importing
from common.settings.load import load_options, load_settings
from common.settings.model import Options, Section, place_of, setting_names, spelling
from common.settings.options import help_parser
from common.targets import check_target

__all__ = ["option_names", "run_listed"]


def run_listed(command: Command, program: str, arguments: Sequence[str], settings: Section | None = None) -> None:
    """Run a command with the arguments of its command line.

    Args:
        command: the row of the table.
        program: name of the program in the help, such as `python -m trainer`.
        arguments: after the name of the command.
        settings: those of the arguments, if they are known already.

    Raises:
        ConfigError: an option is unknown, a value is not allowed, or a module cannot be loaded.
    """
    if settings is None:
        with importing():
            model = _named(command.settings)
        description = command.description or (inspect.getdoc(model) or "").split("\n\n")[0]
        parser = help_parser(model, f"{program} {command.name}", description)
        load = load_options if issubclass(model, Options) else load_settings
        settings = load(model, arguments, parser)
    _check_targets(settings)
    if command.shortcut:
        with importing():
            shortcut = _named(command.shortcut)
        if shortcut(settings):
            return
    with importing():
        work = _named(command.work)
    work(settings)


def option_names(command: Command) -> list[str]:
    """Return the options of a command as the command line spells them, such as `--limits.steps`."""
    model = _named(command.settings)
    names = [spelling(name, field) for name, field in setting_names(model).items()]
    return [*(name for name in names if name.startswith("-")), "--help"]


def _check_targets(settings: Section) -> None:
    for name, field in type(settings).model_fields.items():
        if (target := place_of(field).target) is not None and (path := getattr(settings, name)) is not None:
            check_target(path, spelling(name, field), target)


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)
