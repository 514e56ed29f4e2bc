"""The table of commands names modules that exist and fit together."""

from __future__ import annotations

import pytest

from common.command_line import Command
from tests.support.command_tables import settings_of_table, settings_of_work
from trainer.launch.command_table import COMMANDS


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_the_work_of_each_command_takes_the_settings_that_the_table_names(command: Command) -> None:
    assert settings_of_work(command) is settings_of_table(command)
