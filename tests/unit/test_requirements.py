"""docs/reference/requirements.md has one row for each requirement, and names only commands, settings and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from common.settings.model import Section, setting_names
from data_pipeline.commands.table import COMMANDS as DATA_COMMANDS
from data_pipeline.config import PrepareConfig
from trainer.config import TrainConfig
from trainer.launch.command import COMMANDS as TRAINER_COMMANDS

ROOT = Path(__file__).parents[2]
REQUIREMENTS = {"C": 8, "D": 12, "T": 14, "R": 6, "K": 4, "V": 7, "E": 7, "P": 3}
"""The number of requirements of each letter."""
OTHER_WORDS = {"BASE_IMAGE", ".env", "PET_NNODES", "record.json", "docker compose up", "docker compose exec train bash"}


def rows() -> dict[str, tuple[str, str]]:
    """The cells `use` and `test` of each row, by id."""
    lines = (ROOT / "docs" / "reference" / "requirements.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(r"\| [A-Z]\d", line)]
    assert len({row[0] for row in cells}) == len(cells)
    return {number: (use, test) for number, _, use, test in cells}


def coded(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def sections_of(settings: type[Section]) -> set[str]:
    fields = settings.model_fields.items()
    return {name for name, field in fields if isinstance(field.annotation, type) and issubclass(field.annotation, Section)}


def test_every_requirement_has_one_row_in_its_order() -> None:
    assert list(rows()) == [f"{letter}{number}" for letter, last in REQUIREMENTS.items() for number in range(1, last + 1)]


@pytest.mark.parametrize("number", rows())
def test_a_requirement_is_shown_by_tests_that_exist_or_is_planned(number: str) -> None:
    test = rows()[number][1]
    assert coded(test) or test.startswith("**planned**"), f"{number} names no test, and is not planned"
    for name in coded(test):
        file, function = name.split("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert f"test_{function}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_commands_and_settings_in_the_table_exist() -> None:
    settings = {*setting_names(PrepareConfig), *setting_names(TrainConfig)}
    sections = {f"{name}.*" for model in (PrepareConfig, TrainConfig) for name in sections_of(model)}
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = {
        *(f"python -m data_pipeline {name}" for name in [*DATA_COMMANDS, "prepare --sources"]),
        *(f"python -m trainer {name}" for name in TRAINER_COMMANDS),
        *(f"make {target}" for target in targets),
    }
    known = settings | sections | commands | OTHER_WORDS
    assert [name for use, _ in rows().values() for name in coded(use) if name not in known] == []


def test_every_section_of_the_settings_belongs_to_a_requirement() -> None:
    used = {name.split(".")[0] for use, _ in rows().values() for name in coded(use)}
    for settings in (PrepareConfig, TrainConfig):
        assert sections_of(settings) - used == set()
