"""How OpenMP says that its threads wait, in the process of a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch loads GNU's OpenMP on Linux")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "PASSIVE"),
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "1000"}, "PASSIVE"),
    ],
)
def test_threads_of_a_command_wait_without_using_a_core_unless_the_environment_says_otherwise(
    environment: dict[str, str], shown: str, tmp_path: Path
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "generate", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=clean | {"OMP_DISPLAY_ENV": "verbose"} | environment,
    )
    assert f"OMP_WAIT_POLICY = '{shown}'" in done.stderr
    spins = next(line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
    assert (spins == "0") == (not environment)
