"""A folder of product code has enough modules to be one, and has tests at the same place below `tests/unit`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "data_pipeline", "trainer")
FEWEST = 2


def folders_below(place: Path) -> dict[str, list[str]]:
    """The names of the modules in each folder that has any, `__init__` not counted."""
    found = [place, *(path for path in sorted(place.rglob("*")) if path.is_dir() and path.name != "__pycache__")]
    modules = {path: sorted(one.stem for one in path.glob("*.py") if one.stem != "__init__") for path in found}
    return {path.relative_to(place.parent).as_posix(): names for path, names in modules.items() if any(path.glob("*.py"))}


def too_small(folders: dict[str, list[str]]) -> dict[str, int]:
    return {folder: len(names) for folder, names in folders.items() if len(names) < FEWEST}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_has_at_least_2_modules(package: str) -> None:
    assert too_small(folders_below(ROOT / package)) == {}, "merge the modules with those of another folder"


@pytest.mark.parametrize(("modules", "is_allowed"), [(1, False), (2, True)])
def test_only_modules_are_counted(tmp_path: Path, modules: int, is_allowed: bool) -> None:
    place = tmp_path / "package" / "folder"
    (place / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "page.html", *(f"module_{number}.py" for number in range(modules))):
        (place / name).touch()
    assert ("package/folder" not in too_small(folders_below(tmp_path / "package"))) == is_allowed


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_of_tests_has_the_name_of_a_package(package: str) -> None:
    tests = {path.relative_to(ROOT / "tests" / "unit") for path in (ROOT / "tests" / "unit" / package).rglob("test_*.py")}
    assert tests, f"tests/unit/{package} holds no tests"
    assert {path.parent.as_posix() for path in tests if not (ROOT / path.parent / "__init__.py").is_file()} == set()


MOST_IMPORTS = 30


def modules_imported_by(source: str) -> set[str]:
    """The modules of this project that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_more_than_30_modules_of_the_project(package: str) -> None:
    counts = {
        path.relative_to(ROOT).as_posix(): len(modules_imported_by(path.read_text())) for path in (ROOT / package).rglob("*.py")
    }
    assert {path: count for path, count in counts.items() if count > MOST_IMPORTS} == {}, "a module puts too many parts together"


def test_imports_are_counted_once_and_within_functions() -> None:
    source = "import os, common.text\nfrom trainer.loop import a\ndef f():\n    from trainer.loop import b\n    from .c import d\n"
    assert modules_imported_by(source) == {"common.text", "trainer.loop"}
