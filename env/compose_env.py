"""Writes the lists of settings in docker-compose.yml, so that each can be set as a variable (`make compose-env`).

Compose passes a variable on only if the file names it. The two packages print these names with `schema --env`.
tests/containers/test_static.py fails if the file and the packages differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
SERVICES = {"data-prep": "data_pipeline", "train": "trainer"}

__all__ = ["fill", "main", "settings_of"]


def settings_of(package: str) -> list[str]:
    """Return the environment variables that a package reads, in its order."""
    command = [sys.executable, "-m", package, "schema", "--env"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def fill(text: str, service: str, names: list[str]) -> str:
    """Return the compose file with the names in the marked list of a service. Names that the file sets elsewhere are left out."""
    start = rf"( *)# settings of {service}, passed through .*\n"
    match = re.search(rf"{start}(?:.*\n)*? *# end of the list\n", text)
    if match is None:
        raise ValueError(f"{COMPOSE.name}: no list 'settings of {service}, passed through … end of the list' to write")
    outside = text[: match.start()] + text[match.end() :]
    own = [name for name in names if not re.search(rf"^ *{name}:", outside, re.MULTILINE)]
    indent, head = match[1], match[0].split("\n", 1)[0]
    lines = [head, *(f"{indent}{name}:" for name in own), f"{indent}# end of the list"]
    return text[: match.start()] + "\n".join(lines) + "\n" + text[match.end() :]


def main() -> int:
    """Rewrite docker-compose.yml."""
    text = COMPOSE.read_text(encoding="utf-8")
    for service, package in SERVICES.items():
        text = fill(text, service, settings_of(package))
    COMPOSE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
