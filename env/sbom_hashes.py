"""Adds the hashes of the locks to a CycloneDX file: `python sbom_hashes.py FILE LOCK…`. See env/sbom.

An installation does not keep the hash of the file that it came from. But pip has accepted only the hashes of the lock, one for each
file of that version, so a component gets all of these. A package that is in no lock gets none.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def hashes_of(lock: str) -> dict[tuple[str, str], list[str]]:
    """Return the SHA-256 hashes of a lock by name and version."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    pins = {match.groups(): block for block in blocks if (match := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", block))}
    return {(_normal(name), version): re.findall(r"sha256:([0-9a-f]{64})", block) for (name, version), block in pins.items()}


def main(file: str, *locks: str) -> None:
    """Rewrite the file."""
    found: dict[tuple[str, str], list[str]] = {}
    for lock in locks:
        found = hashes_of(Path(lock).read_text(encoding="utf-8")) | found
    bom = json.loads(Path(file).read_text(encoding="utf-8"))
    for component in bom["components"]:
        version = component.get("version", "").partition("+")[0]  # torch's local version, such as 2.13.0+cu130
        if hashes := found.get((_normal(component["name"]), version)):
            component["hashes"] = [{"alg": "SHA-256", "content": each} for each in sorted(set(hashes))]
    Path(file).write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(*sys.argv[1:])
