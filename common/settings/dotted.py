"""Nested settings by their dotted names, `{"optim": {"lr": 1}}` as `{"optim.lr": 1}`, and as TOML."""

from __future__ import annotations

import json
import re
import tomllib
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


_MAX_DOTS = 256  # the parser takes quadratic time for dotted names: 64,000 parts take 50 s (November 2026)
_TOML_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*+(?P<double>\")?+|'[^']*+(?P<single>')?+""")
"""The part after an open quote is matched too, so that no character of it is read again."""


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the tables of a TOML file. ValueError: it is no TOML, nested too deeply, or a line has more than 256 dots."""
    text = data.decode("utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        outside = line if line.count(".") <= _MAX_DOTS else _TOML_STRING.sub(lambda one: "" if one.lastgroup else one[0], line)
        if outside.count(".") > _MAX_DOTS:
            raise ValueError(f"line {number} has more than {_MAX_DOTS} dots outside of texts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def to_toml(table: str, values: Mapping[str, Any]) -> str:
    """Return nested plain values as TOML tables under `[table]`. None is left out, because TOML cannot represent it."""
    lines = [f"[{table}]"]
    lines += [
        f"{_toml_key(name)} = {_toml_value(value)}"
        for name, value in values.items()
        if not isinstance(value, dict) and value is not None
    ]
    sections = [to_toml(f"{table}.{_toml_key(name)}", value) for name, value in values.items() if isinstance(value, dict)]
    return "\n".join(lines) + "\n" + "".join("\n" + section for section in sections)


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    """Return a value as JSON, but with TOML's escapes: TOML has no surrogates and forbids some invisible characters."""
    text = json.dumps(value, ensure_ascii=False)
    escaped = (one if one.isprintable() else f"\\u{ord(one):04x}" if one <= "\uffff" else f"\\U{ord(one):08x}" for one in text)
    return text if text.isprintable() else "".join(escaped)
