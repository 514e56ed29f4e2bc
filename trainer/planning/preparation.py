"""Whether data was prepared as the recipe of a training prepares it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from common.files import UnusableFileError, read_input
from common.settings.dotted import flatten
from common.settings.load import AUTO, MAX_SETTINGS_BYTES, recipe_path
from common.settings.toml import parse_toml
from common.text import some_of
from data_pipeline.dataset.manifest import Manifest

_SHOWN = 3


def other_preparation(recipe: str | None, manifest: Manifest) -> str | None:
    """Return a sentence with the settings that decide the rows and differ from a readable recipe; None if there are none."""
    wanted: Any = {}
    if recipe not in (None, AUTO):
        with suppress(OSError, ValueError, UnusableFileError):
            wanted = parse_toml(read_input(recipe_path(str(recipe)), MAX_SETTINGS_BYTES)).get("prepare")
    used = flatten(manifest.content_settings)
    found = [
        f"{name} = {used[name]} instead of {value}"
        for name, value in (flatten(wanted).items() if isinstance(wanted, Mapping) else ())
        if name in used and used[name] != value
    ]
    if not found:
        return None
    return f"the data was not prepared with the recipe {recipe}: it has {some_of(found, _SHOWN)}"
