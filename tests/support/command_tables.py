"""A check that the tables of commands of both packages share."""

from __future__ import annotations

import typing
from importlib import import_module
from typing import Any

from common.command_line import Command

__all__ = ["settings_of_table", "settings_of_work"]


def settings_of_table(command: Command) -> Any:
    """Return the class of the settings that the row of a command names."""
    return _named(command.settings)


def settings_of_work(command: Command) -> Any:
    """Return the class of the settings that the function of a command takes."""
    [settings, _] = typing.get_type_hints(_named(command.work)).values()
    return settings


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)
