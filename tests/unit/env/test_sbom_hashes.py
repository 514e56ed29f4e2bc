"""The list of packages has the hashes of the locks."""

from __future__ import annotations

import json
from pathlib import Path

from env.sbom_hashes import main

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_a_component_gets_the_hashes_that_the_lock_accepts_for_its_version(tmp_path: Path) -> None:
    zope = f"Zope.Interface==1.0 ; python_version > '3' \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n"
    image = f"# made\n{zope}other==2 \\\n    --hash=sha256:{B}\n"
    (tmp_path / "image.lock").write_text(image)
    (tmp_path / "base.lock").write_text(f"torch==2.13.0 \\\n    --hash=sha256:{C}\nother==2 \\\n    --hash=sha256:{C}\n")
    packages = {"zope-interface": "1.0", "other": "2", "torch": "2.13.0+cu130", "unlocked": "1", "nameless": ""}
    bom = {"components": [{"name": name, "version": version} for name, version in packages.items()]}
    (tmp_path / "bom.json").write_text(json.dumps(bom))
    main(str(tmp_path / "bom.json"), str(tmp_path / "image.lock"), str(tmp_path / "base.lock"))
    components = json.loads((tmp_path / "bom.json").read_text())["components"]
    found = {one["name"]: [each["content"] for each in one.get("hashes", [])] for one in components}
    assert found == {"zope-interface": [A, B], "other": [B], "torch": [C], "unlocked": [], "nameless": []}
