"""Nested settings by their dotted names: `{"optim": {"lr": 1}}` as `{"optim.lr": 1}`, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["flatten", "nest", "without"]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names. An empty mapping has none."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, leaf = name.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return nested


def without(values: Mapping[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return nested values without those of these dotted names. A mapping that becomes empty is left out too."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if prefix + name in names:
            continue
        inner = without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        if inner != {} or value == {}:
            kept[name] = inner
    return kept
