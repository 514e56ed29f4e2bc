"""The example notebooks run from top to bottom on a small run. Their cells are executed in order, in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
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
        ("checkpoint", ["Once", "norm.weight"]),
    ],
)
def test_a_notebook_runs_and_leaves_the_folders_as_they_are(name: str, said: list[str], workspace: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in workspace.rglob("*") if path.is_file()}
    result = execute(ROOT / "examples/notebooks" / f"{name}.ipynb", workspace)
    assert result.returncode == 0, result.stderr
    assert all(line in result.stdout for line in said), result.stdout
    assert {path: path.stat().st_mtime_ns for path in workspace.rglob("*") if path.is_file()} == before


def test_every_notebook_is_executed_and_stored_without_output() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["checkpoint", "rows"]
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None
