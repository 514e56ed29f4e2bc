"""The wheel: it provides the program, with all files that the packages read, from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.runs import ROOT

_SOURCES = ("common", "data_pipeline", "trainer", "env")
_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from a copy, because a build writes into its source folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in _SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={target}", str(source)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install = ["install", "--quiet", "--no-deps", "--no-index", f"--target={folder}", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    return folder


def trainer(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PYTHONPATH": str(installed), "COLUMNS": "80"}
    command = [str(installed / "bin/trainer"), *words]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=120)


def test_the_wheel_holds_every_file_that_the_packages_read(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in ("common", "data_pipeline", "trainer"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*") if path.is_file()}
        assert {name for name in files if "__pycache__" not in name} <= held
    for pattern in ("requirements*.lock", "recipes/*.toml"):
        files = {f"common/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "env").glob(pattern)}
        assert files
        assert files <= held


def test_the_wheel_holds_no_tests_and_no_examples(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"common", "data_pipeline", "trainer"}


def test_the_program_of_the_wheel_prepares_with_a_recipe_in_any_directory(installed: Path, tmp_path: Path) -> None:
    assert trainer(installed, tmp_path, "--version").stdout == "trainer 0.1.0\n"
    (tmp_path / "text").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path / "text/page.md")
    settings = ("--sources", "text", "--output", "data", "--recipe", "smoke", "--text.documents", "paragraphs")
    done = trainer(installed, tmp_path, "prepare", *settings)
    assert done.returncode == 0, done.stderr
    checked = trainer(installed, tmp_path, "verify-data", "data")
    assert checked.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_the_launcher_of_the_wheel_starts_a_training_and_refuses_missing_data(installed: Path, tmp_path: Path) -> None:
    refused = trainer(installed, tmp_path, "train", "--recipe", "smoke", "--data", "data", "--run", "run")
    assert refused.returncode == 3
    assert refused.stderr.count("error: ") == 1, refused.stderr
