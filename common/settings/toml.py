from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

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
    return text if text.isprintable() else "".join(one if one.isprintable() else _escape(ord(one)) for one in text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
