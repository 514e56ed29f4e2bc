"""Small searches: their files, their command, and their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.prepared import write_prepared

RECIPE = """[train]
device = "cpu"
precision = "fp32"
[train.model]
layers = 1
width = 32
heads = 4
context = 32
[train.batch]
global_batch_size = 8
micro_batch_size = 4
[train.schedule]
warmup_steps = 3
[train.limits]
steps = 24
[train.eval]
every_steps = 4
sample_tokens = 0
[train.checkpoint]
every_steps = 4
[train.log]
report = false
hardware_every_s = 0
"""
SPACE = "optim.lr = {low = 1e-4, high = 1e-1, log = true}\nmodel.layers = {choices = [1, 2]}\n"


def words(folder: Path, *more: str, space: str = SPACE, recipe: str = RECIPE) -> list[str]:
    """Write the files of a search into a folder. Return its command; the folder of the search is `out` there."""
    if not (folder / "data").exists():
        write_prepared(folder / "data")
    (folder / "recipe.toml").write_text(recipe)
    (folder / "space.toml").write_text(space)
    places = {"recipe": "recipe.toml", "space": "space.toml", "output": "out", "data": "data"}
    return ["trainer", "tune", *(word for name, file in places.items() for word in (f"--{name}", str(folder / file))), *more]


def trials_of(folder: Path) -> list[dict[str, Any]]:
    """Return the trials of the search in a folder."""
    listed: list[dict[str, Any]] = json.loads((folder / "out" / "trials.json").read_text())["trials"]
    return listed
