"""The names that extension files may import: all of them exist, and the examples and the documentation use no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from trainer import api

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PROJECT = ("common", "data_pipeline", "trainer")


def project_imports(path: Path) -> Iterator[str]:
    """The names that a file imports from this project, with their modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PROJECT)
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PROJECT:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_imports_nothing_of_the_project_but_names_of_the_api(path: Path) -> None:
    assert set(project_imports(path)) <= {f"trainer.api.{name}" for name in api.__all__}


def test_the_imports_of_the_examples_are_found() -> None:
    assert {name.partition(".")[0] for path in EXAMPLES for name in project_imports(path)} == {"trainer"}


def test_the_documentation_of_extensions_names_the_whole_api_and_no_other_module() -> None:
    section = (ROOT / "docs/guide/extending.md").read_text()
    assert {name for name in api.__all__ if f"`{name}`" not in section} == set()
    assert set(re.findall(r"`(?:trainer|common)\.\w[\w.]*", section)) <= {
        "`trainer.api",
        *(f"`trainer.api.{name}" for name in api.__all__),
    }


def test_each_name_of_the_api_in_the_documentation_exists() -> None:
    named = {name for path in DOCS for name in re.findall(r"trainer\.api\.(\w+)", path.read_text())}
    assert named
    assert named <= set(api.__all__)


def test_the_api_has_no_public_name_that_it_does_not_promise() -> None:
    public = {name for name in vars(api) if not name.startswith("_")} - {"annotations"}
    assert public == set(api.__all__)
