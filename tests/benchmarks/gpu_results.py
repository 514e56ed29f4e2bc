"""The results of `make gpu`: one JSON file that every part adds to, and the table made from it.

Each measurement has a status: `passed`, `failed` with a reason, or `unmeasured` with a reason.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from common.files import write_atomic
from tests.benchmarks.page import DOCS, write_between

Item = dict[str, Any]
EXPECTED: Mapping[str, tuple[str, ...]] = {
    "tests": ("tests marked gpu",),
    "golden": ("losses of smoke", "losses of demo", "losses of shakespeare-char"),
    "train": ("reproducibility = run, compiled", "stopped half way and resumed: the same bits"),
    "levels": ("reproducibility = run, not compiled", "reproducibility = off, compiled", "reproducibility = elastic, compiled"),
    "peers": ("plain loop", "transformers Trainer"),
}
"""The measurements of each part."""
_BEGIN, _END = "<!-- results of make gpu -->", "<!-- end of the results of make gpu -->"
_UNSHOWN = ("status", "reason", "date", "losses", "last_line")


def passed(**figures: Any) -> Item:
    """Return the item of a measurement that succeeded."""
    return {"status": "passed"} | figures


def failed(reason: str, **figures: Any) -> Item:
    """Return the item of a measurement that failed."""
    return {"status": "failed", "reason": reason} | figures


def unmeasured(reason: str) -> Item:
    """Return the item of a measurement that was not made."""
    return {"status": "unmeasured", "reason": reason}


class Results:
    """The results in a folder: `results.json`, which holds those of earlier commands too, and `results.md`.

    Args:
        folder: where both files are.
        machine: the machine that measures, see `this_machine`. Results of another one are dropped. None: keep all results.
    """

    def __init__(self, folder: Path, machine: str | None) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.json"
        earlier = json.loads(path.read_text()) if path.exists() else {"machine": "no machine", "items": {}}
        self.machine: str = machine or earlier["machine"]
        self.items: dict[str, dict[str, Item]] = earlier["items"] if earlier["machine"] == self.machine else {}

    def begin(self, part: str) -> None:
        """Drop the earlier results of a part."""
        self.items[part] = {}

    def add(self, part: str, name: str, item: Item) -> None:
        """Add a result, and write both files, so that a command that is killed leaves the results until then."""
        self.items[part][name] = item | {"date": datetime.now(UTC).date().isoformat()}
        content = {"machine": self.machine, "items": self.items}
        write_atomic(self._folder / "results.json", (json.dumps(content, indent=1) + "\n").encode())
        write_atomic(self._folder / "results.md", self.describe().encode())

    def describe(self) -> str:
        """Return the machine and a table of all measurements in Markdown, also of those that were not made."""
        rows = [(part, name, self._item(part, name)) for part, names in EXPECTED.items() for name in names]
        dates = sorted({item["date"] for _, _, item in rows if "date" in item})
        lines = [f"{' to '.join(dict.fromkeys((dates[0], dates[-1]))) if dates else 'Not run'}, {self.machine}: `make gpu`", ""]
        lines += ["| part | measurement | result | figures |", "|---|---|---|---|"]
        lines += [f"| {part} | {name} | {item['status']} | {_figures(item)} |" for part, name, item in rows]
        return "\n".join(lines) + "\n"

    def counts(self) -> dict[str, int]:
        """Return the number of measurements by status."""
        found = [self._item(part, name)["status"] for part, names in EXPECTED.items() for name in names]
        return {status: found.count(status) for status in ("passed", "failed", "unmeasured")}

    def write_docs(self, docs: Path = DOCS) -> None:
        """Write the table into docs/benchmarks.md, between the two marks."""
        write_between(docs, _BEGIN, _END, self.describe())

    def _item(self, part: str, name: str) -> Item:
        return self.items.get(part, {}).get(name) or unmeasured("not run")


def _figures(item: Item) -> str:
    shown = [str(item["reason"])] if "reason" in item else []
    shown += [f"{name} {_plain(value)}" for name, value in item.items() if name not in _UNSHOWN and value is not None]
    return re.sub(r"\s+", " ", ", ".join(shown)).replace("|", "/")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def this_machine(*, rehearsed: bool) -> str:
    """Return the GPU, its driver and the versions that results depend on."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if rehearsed:
        return f"a rehearsal on a CPU, {versions}"
    return f"{torch.cuda.get_device_name()}, driver {_driver()}, CUDA {torch.version.cuda}, {versions}"


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    command = [program or "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split() if program else []
    return found[0] if found else "unknown"
