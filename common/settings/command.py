from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from common.command_line import Command, failed_import, importing
from common.settings.load import load_options, load_settings
from common.settings.model import Options, Settings, place_of, setting_names, spelling
from common.settings.options import help_parser
from common.targets import check_target


def loaded(command: Command) -> tuple[type[Settings] | type[Options], Callable[[Any], None]]:
    run = import_module(command.module).run
    [model, _] = typing.get_type_hints(run).values()
    return model, run


def run_listed(command: Command, program: str, arguments: Sequence[str], settings: Any = None) -> None:
    """Run a command. Its help begins with the docstring of its options, or of `run` for a model of `Settings`."""
    with importing():
        model, run = loaded(command)
    if settings is None:
        description = inspect.getdoc(model if issubclass(model, Options) else run) or ""
        parser = help_parser(model, f"{program} {command.name}", description.split("\n\n", maxsplit=1)[0])
        settings = load_options(model, arguments, parser) if issubclass(model, Options) else load_settings(model, arguments, parser)
    check_targets(settings)
    try:
        run(settings)
    except Exception as error:
        if not failed_import(error, command.module.rpartition(".")[0]):
            raise
        with importing():
            raise


def check_targets(settings: Settings | Options) -> None:
    for name, field in type(settings).model_fields.items():
        if (target := place_of(field).target) is not None and (path := getattr(settings, name)) is not None:
            check_target(path, spelling(name, field), target)


def option_names(command: Command) -> list[str]:
    """For example `--limits.steps`."""
    names = [spelling(name, field) for name, field in setting_names(loaded(command)[0]).items()]
    return [*(name for name in names if name.startswith("-")), "--help"]
