"""Prepares the data of a run again and compares it with the original."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, PreparedDataError
from common.settings.toml import to_toml
from data_pipeline.dataset.manifest import Manifest, read_manifest
from trainer.verification.child import run_tied
from trainer.verification.outcome import Outcome

_ROOT = Path(__file__).resolve().parents[2]
_BUILTIN = {"stdlib-code", "stdlib-manual"}


def prepare_again(directory: Path, manifest: Manifest, sources: Sequence[str]) -> Outcome:
    """Prepare the data again, and compare the root digests. A manifest has no paths, so users name all but the built-in sources."""
    if not sources and set(manifest.sources) <= _BUILTIN:
        sources = ("builtin",)
    if reason := _not_preparable(manifest, sources):
        return Outcome("data", f"data         not prepared again: {reason}", {"prepared_again": False, "reason": reason})
    with tempfile.TemporaryDirectory(prefix="prepared-again-") as name:
        output, recipe = Path(name) / "data", Path(name) / "recipe.toml"
        recipe.write_text(to_toml("prepare", recipe_of(manifest, sources)), encoding="utf-8")
        plain = [source for source in sources if "=" not in source]
        command = [sys.executable, "-P", "-m", "data_pipeline", "prepare", "--recipe", str(recipe), "--output", str(output)]
        done = run_tied(
            [*command, *(["--sources", *plain] if plain else [])],
            cwd=Path.cwd(),
            env={name: value for name, value in os.environ.items() if not name.startswith("PREP_")} | {"PYTHONPATH": str(_ROOT)},
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()[-1:]
            raise PreparedDataError(f"{directory}: its sources cannot be prepared again: {' '.join(errors)}")
        again = read_manifest(output)
    if again.root_digest != manifest.root_digest:
        raise PreparedDataError(
            f"{directory}: prepared again, its root digest is {again.root_digest}, not {manifest.root_digest}; "
            f"{difference_of_manifests(manifest, again)}"
        )
    return Outcome("data", f"data         prepared again, with the same root digest {again.root_digest}", {"prepared_again": True})


def _not_preparable(manifest: Manifest, sources: Sequence[str]) -> str:
    """Return why the data cannot be prepared again, an empty string if it can."""
    if not manifest.config:
        return "its manifest holds no settings"
    if files := manifest.named_files:
        return f"{', '.join(files)} named files, and the manifest has only their digests; prepare again yourself and compare"
    named = {source.partition("=")[0] for source in sources if "=" in source}
    if missing := [name for name in manifest.shaping["source"] if name not in named]:
        return f"the location of source{'s' * (len(missing) > 1)} {', '.join(missing)} is not known; give --sources NAME=PATH"
    if not sources:
        return f"the location of sources {', '.join(manifest.sources)} is not known; give --sources PATH …"
    return ""


def recipe_of(manifest: Manifest, sources: Sequence[str]) -> dict[str, Any]:
    """Return the settings that change bytes, and the sources. A manifest is untrusted: no other field may decide about files."""
    settings = _none_words(manifest.shaping)
    for source in sources:
        name, separator, path = source.partition("=")
        if separator:
            if name not in settings["source"]:
                raise ConfigError(f"--sources {source}: the data has the sources {', '.join(manifest.sources)}, and no {name}")
            settings["source"][name].setdefault("paths", []).append(path)
    return settings


def _none_words(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _none_words(value) if isinstance(value, dict) else "none" if value is None else value
        for name, value in values.items()
    }


def difference_of_manifests(recorded: Manifest, again: Manifest) -> str:
    """Return the most useful difference of two manifests: the first input that differs, else the first shard."""
    parts = [
        ({f"{one['source']}/{one['path']}": one for one in found.inputs}, {one.path: one for one in found.shards})
        for found in (recorded, again)
    ]
    for kind, ours, theirs in zip(("inputs", "shards"), *parts, strict=True):
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                change = "is new" if name not in ours else "is missing" if name not in theirs else "has different content"
                return f"the first of the {kind} that differs: {name} {change}"
    return "settings, program or versions differ"
