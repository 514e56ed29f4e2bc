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
    ("environment", "policy", "spins"),
    [
        ({}, "PASSIVE", "1000"),  # the library shows this policy for all that wait less than for ever
        ({"OMP_WAIT_POLICY": "active"}, "ACTIVE", "30000000000"),
        ({"OMP_WAIT_POLICY": "passive"}, "PASSIVE", "0"),
        ({"GOMP_SPINCOUNT": "500"}, "PASSIVE", "500"),
    ],
)
def test_threads_of_a_command_soon_give_their_core_away_unless_the_environment_says_otherwise(
    environment: dict[str, str], policy: str, spins: str, tmp_path: Path
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
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
