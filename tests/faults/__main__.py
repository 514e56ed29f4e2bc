"""`python -m tests.faults [pytest arguments]` runs the campaigns with their full counts and writes the tables of docs/faults.md.

With `-k` or the name of a file only some rows are run, and only their lines are rewritten. FAULTS_RECORDS names a folder in which
the records are kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults import table
from tests.support.claims import RECORDS
from tests.support.faults import ROOT


def run(arguments: list[str]) -> int:
    """Return the exit code of pytest. The tables are written even if tests fail, because they must show failed rows."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get(RECORDS) or temporary).absolute()
        chosen = arguments if any("tests/faults" in argument for argument in arguments) else ["tests/faults", *arguments]
        environment = os.environ | {"FAULTS": "full", RECORDS: str(folder)}
        done = subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=ROOT, env=environment, check=False)
        folder.mkdir(parents=True, exist_ok=True)
        table.main(folder)
        return done.returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
