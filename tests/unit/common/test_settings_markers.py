"""Settings say in their type what they are, and code that treats them by it needs no list of names."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.settings.markers import ASKED_AGAIN, Effect
from common.settings.model import all_settings, settings_with
from data_pipeline.config import PrepareConfig
from trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = sorted(
    (path.relative_to(ROOT).as_posix(), node.name)
    for package in ("data_pipeline", "trainer")
    for path in (ROOT / package / "config").glob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
    and any(isinstance(base, ast.Name) and base.id in ("Section", "Settings") for base in node.bases)
)
IMPORTS_EACH = """
import importlib, os, pathlib, sys, pydantic
for file, name, setting in (line.split(maxsplit=2) for line in sys.stdin.read().splitlines()):
    sys.stdout.flush()
    if os.fork():
        print(file, name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    source = pathlib.Path(file).read_text()
    lines = source.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(f"class {name}("))
    place = next(number for number in range(place, len(lines)) if lines[number].endswith('\"\"\"'))
    lines.insert(place + 1, f"    {setting}")
    pathlib.Path(file).write_text("\\n".join(lines))
    try:
        importlib.import_module(file.split("/")[0] + ".config")
        code = 0
    except TypeError as error:
        code = 1 if "added" in str(error) and "effect" in str(error) else 2
    pathlib.Path(file).write_text(source)
    os._exit(code)
"""


def added_to_each_section(folder: Path, setting: str) -> dict[tuple[str, str], int]:
    """Add a setting to each section of a copy, and import it; returns 0 for an import, 1 for the refusal of the setting."""
    for package in ("common", "data_pipeline", "trainer"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    lines = "".join(f"{file} {name} {setting}\n" for file, name in SECTIONS)
    command = [sys.executable, "-B", "-c", IMPORTS_EACH]
    run = subprocess.run(command, cwd=folder, input=lines, env={}, capture_output=True, text=True, check=True)
    found = [line.split() for line in run.stdout.splitlines()]
    return {(file, name): int(code) for file, name, code in found}


def test_a_setting_without_an_effect_ends_the_import(tmp_path: Path) -> None:
    assert added_to_each_section(tmp_path, "added: int = Field(1)") == dict.fromkeys(SECTIONS, 1)


@pytest.mark.parametrize("model", [PrepareConfig, TrainConfig])
def test_every_setting_has_one_effect(model: type[PrepareConfig | TrainConfig]) -> None:
    by_effect = {effect: settings_with(model, effect) for effect in Effect}
    names = [name for found in by_effect.values() for name in found]
    assert sorted(names) == sorted(name for name, _ in all_settings(model))


def test_settings_that_run_code_or_contact_services_are_asked_again() -> None:
    assert settings_with(TrainConfig, ASKED_AGAIN) == ["extension", "log.mlflow_uri"]
