"""Settings in TOML files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

__all__ = ["parse_toml", "to_toml"]

_MAX_DOTS = 256
_TOML_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*"|'[^']*'""")


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ValueError: it is no TOML, or nothing that settings need: nested too deeply, or with names of more than 256 parts, which
            the parser takes quadratic time for (64,000 parts: 50 s, November 2026).
    """
    text = data.decode("utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS and _TOML_STRING.sub("", line).count(".") > _MAX_DOTS:
            raise ValueError(f"line {number} has more than {_MAX_DOTS} dots outside of texts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def to_toml(table: str, values: Mapping[str, Any]) -> str:
    """Nested plain values as TOML tables under `[table]`; a value of None is left out, as TOML has no word for it."""
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
    """JSON, but for characters beyond U+FFFF, where TOML knows no surrogates, and for unseen ones, which TOML forbids in part."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(map(_toml_character, text))


def _toml_character(character: str) -> str:
    code = ord(character)
    return character if character.isprintable() else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
