"""A run's folder has one reader: no module outside of `trainer/runs` parses its record or its settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
RAW = {
    "trainer/doctor/bundle.py": "an archive also tells what it can of a damaged run",
    "trainer/launch/__main__.py": "whether a run may be finished, before anything is imported",
}
"""Modules that read the bytes of these files themselves, each with its reason."""
FILES = {"record.json", "config.toml"}
PARSERS = {"parse_toml", "parse_json", "loads", "unsealed"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("trainer/runs/") and name not in RAW:
            yield name, ast.parse(path.read_text())


def called(tree: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {ast.unparse(function).rpartition(".")[2] for function in functions}


def opens_a_file_of_a_run(tree: ast.AST) -> bool:
    """Whether a function names the record or the settings of a run, and parses something."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "trainer.runs.layout"]
    names = {alias.name for node in imports for alias in node.names} & {"RECORD", "CONFIG"}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        if (FILES & texts or names & used) and PARSERS & called(function):
            return True
    return False


def indexes_a_record(tree: ast.AST) -> bool:
    """Whether a module that imports the record of a run takes a value out of one by a string."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    if not {"Record", "SavedRun"} & imported:
        return False
    indexed = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)]
    return any(ast.unparse(node.value).endswith("record") for node in indexed if isinstance(node.slice.value, str))


def test_no_other_module_reads_the_record_or_the_settings() -> None:
    assert [name for name, tree in modules() if opens_a_file_of_a_run(tree)] == []


def test_no_module_indexes_a_record_by_strings() -> None:
    assert [name for name, tree in modules() if indexes_a_record(tree)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(run): return parse_toml((run / 'config.toml').read_bytes())", True),
        ("from trainer.runs.layout import RECORD\ndef f(run): return json.loads((run / RECORD).read_text())", True),
        ("from trainer.runs.layout import RECORD\ndef f(run): return (run / RECORD).exists()", False),
    ],
)
def test_a_reader_is_found(code: str, found: bool) -> None:
    assert opens_a_file_of_a_run(ast.parse(code)) is found


def test_no_other_module_reads_a_run_but_with_a_saved_run() -> None:
    imported = {
        (name, alias.name)
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert [name for name, one in sorted(imported) if one in ("parse_record", "record_bytes")] == []


def test_an_index_is_found() -> None:
    code = "from trainer.runs.saved_run import SavedRun\nprint(self.record['status'])"
    assert indexes_a_record(ast.parse(code))
    assert not indexes_a_record(ast.parse(code.replace("['status']", ".status")))
