"""The table of commands names modules that exist and fit together."""

from __future__ import annotations

import typing
from importlib import import_module
from typing import Any

import pytest

from common.command_line import Command
from trainer.launch.command_table import COMMANDS


def named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_the_work_of_each_command_takes_the_settings_that_the_table_names(command: Command) -> None:
    [settings, _] = typing.get_type_hints(named(command.work)).values()
    assert settings is named(command.settings)
