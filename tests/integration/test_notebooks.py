"""The example notebooks run from top to bottom on a small run. Their cells are executed in order, in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, tiny_config
from trainer.loop import train

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    data = write_prepared(folder / "data")
    train(tiny_config(data, folder / "run", limits={"steps": 2}))
    return folder


def execute(notebook: Path, workspace: Path) -> subprocess.CompletedProcess[str]:
    code = code_of(notebook)
    variables = {
        "DATA": str(workspace / "data"),
        "RUN": str(workspace / "run"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-"],
        input=code,
        cwd=workspace,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows", ["61 training rows of 32 tokens", "--- document 0,", "pieces in a row: 2.0"]),
        ("checkpoint", ["Once", "norm.weight", "saved at steps [2]"]),
    ],
)
def test_a_notebook_runs_and_leaves_the_folders_as_they_are(name: str, said: list[str], workspace: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in workspace.rglob("*") if path.is_file()}
    result = execute(ROOT / "examples/notebooks" / f"{name}.ipynb", workspace)
    assert result.returncode == 0, result.stderr
    assert all(line in result.stdout for line in said), result.stdout
    assert {path: path.stat().st_mtime_ns for path in workspace.rglob("*") if path.is_file()} == before


def test_the_notebook_of_a_training_makes_a_model_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        text = f"Sentence {number} of a text about the sea, and of the birds above it.\n" * 20
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    monkeypatch.setenv("TEXT", str(tmp_path / "text"))
    result = execute(ROOT / "examples/notebooks/training.ipynb", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step   41  loss" in result.stdout
    assert "run/report.html" in result.stdout
    assert (tmp_path / "run/report.html").is_file()
    assert "\ndef " in result.stdout


def test_notebooks_and_examples_import_only_what_is_supported() -> None:
    sources = {
        path: "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code") for path in NOTEBOOKS
    }
    sources |= {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))}
    assert len(sources) > 5
    for path, source in sources.items():
        own = set(re.findall(r"^\s*(?:from|import) ((?:trainer|data_pipeline|common)[\w.]*)", source, re.MULTILINE))
        assert own <= ({"trainer"} if path in NOTEBOOKS else {"trainer.api"}), path


def code_of(notebook: Path) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code")


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return found


def test_every_notebook_is_executed_and_stored_without_output() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["checkpoint", "rows", "training"]
    for path in NOTEBOOKS:
        for cell in cells(path):
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None
