"""A second build of the same commit gives the same layers; and the list of the packages of the image."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from env.sbom_hashes import hashes_of
from tests.containers.services import IMAGE, ROOT, Services
from trainer.machine.environment import unlocked_packages

pytestmark = [pytest.mark.containers, pytest.mark.rebuild]


def test_a_build_without_cache_has_the_same_layers_above_the_base(services: Services) -> None:
    rebuilt = subprocess.run(
        [ROOT / "env/rebuild", IMAGE],
        env=services.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert rebuilt.returncode == 0, rebuilt.stdout
    assert "have the same layers" in rebuilt.stdout
    assert rebuilt.stdout.count("  the same\n") >= 3, rebuilt.stdout


def test_the_list_of_packages_has_every_package_of_the_lock_and_those_of_the_base(services: Services, tmp_path: Path) -> None:
    listed = subprocess.run(
        [ROOT / "env/sbom", IMAGE, str(tmp_path)],
        env=services.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert listed.returncode == 0, listed.stdout
    bom = json.loads((tmp_path / "sbom.cdx.json").read_text())
    assert bom["bomFormat"] == "CycloneDX"
    found = {component["name"].lower(): component["version"] for component in bom["components"]}
    assert unlocked_packages((ROOT / "env/requirements-image.lock").read_text(), found) == {}
    assert found["torch"].startswith("2.13.0")
    assert "cyclonedx-bom" not in found
    lock = hashes_of((ROOT / "env/requirements-image.lock").read_text())
    names = {(one["name"].lower().replace("_", "-"), one["version"]): one for one in bom["components"]}
    assert len(names.keys() & lock.keys()) > len(lock) / 2
    for package in names.keys() & lock.keys():
        assert {each["content"] for each in names[package]["hashes"]} == set(lock[package])
