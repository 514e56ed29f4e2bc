"""A second build of the same commit gives the same layers."""

from __future__ import annotations

import subprocess

import pytest

from tests.containers.services import IMAGE, ROOT, Services

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
