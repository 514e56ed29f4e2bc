"""Nested settings by their dotted names: `{"optim": {"lr": 1}}` as `{"optim.lr": 1}`, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "", *, empty: bool = False) -> dict[str, Any]:
    """An empty mapping has no names, or counts as a value (`empty`)."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_table = isinstance(value, Mapping) and (value or not empty)
        flat |= flatten(value, f"{prefix}{name}.", empty=empty) if is_table else {prefix + name: value}
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


def merge(base: dict[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in update.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            merge(base[name], value)
        else:
            base[name] = value
    return base


def without(values: Mapping[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """A mapping that becomes empty is left out too."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if prefix + name in names:
            continue
        inner = without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        if inner != {} or value == {}:
            kept[name] = inner
    return kept
