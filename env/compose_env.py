"""Writes the files that name the settings that docker-compose.yml passes on (`make compose-env`).

A line of an env_file that is a name without a value passes the variable of that name on, from the shell or from .env. Compose
passes no other variable of the shell. The two packages print the names with `schema --env`. tests/containers/test_static.py fails
if a file and its package differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
PACKAGES = {"env/settings/prepare.env": "data_pipeline", "env/settings/train.env": "trainer"}

__all__ = ["PACKAGES", "content", "main"]


def content(package: str) -> str:
    """Return the file of a package: its environment variables in its order, without those that docker-compose.yml sets itself."""
    command = [sys.executable, "-m", package, "schema", "--env"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    compose = COMPOSE.read_text(encoding="utf-8")
    listed = [name for name in names if not re.search(rf"^ *{name}:", compose, re.MULTILINE)]
    return "\n".join(("# Made by `make compose-env`: docker-compose.yml takes these from the shell or from .env.", *listed, ""))


def main() -> int:
    """Write both files."""
    for name, package in PACKAGES.items():
        (ROOT / name).write_text(content(package), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
