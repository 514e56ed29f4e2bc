from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from common.terminal import printable


def size(num_bytes: float) -> str:
    """In decimal units: `517 bytes`, `1.2 kB`, `3.4 TB`."""
    if num_bytes < 1000:
        return f"{num_bytes:,.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} PB"


def share(of_one: float) -> str:
    """A share from 0 to 1 in per cent. Only 0 and 1 are called 0 % and 100 %: `< 0.1 %`, `12.3 %`, `> 99.9 %`."""
    if of_one in (0, 1):
        return f"{100 * of_one:.0f} %"
    if 0 < of_one < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= of_one < 1:
        return "> 99.9 %"
    return f"{100 * of_one:,.1f} %"


def decimal(value: float) -> str:
    """A number with the digits that say something: `1,234,567`, `890.5`, `41.2`, `0.00123`."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def count(value: float) -> str:
    """With thousands separators: `1,234,567`; `nan` and `inf` as they are."""
    return f"{value:,.0f}" if math.isfinite(value) else str(value)


def rate(per_second: float) -> str:
    """With three digits and a unit prefix: `812`, `24.1k`, `1.25M`."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_second) >= 0.9995 * unit:  # below this value, three digits of the smaller unit are at most 999
            return f"{per_second / unit:.3g}{sign}"
    return f"{per_second:.3g}"


def duration(seconds: float) -> str:
    """For example `0.4 s`, `45 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def visible(text: str) -> str:
    """Return `text` with its number in place of each invisible character, except for line feeds and tabs."""
    return printable(text, kept="\n\t")


def format_bytes(size: int) -> str:
    value, units = float(size), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if value < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def shortened(text: str, most: int, *, from_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return f"…{text[1 - most :]}" if from_end else f"{text[: most - 1]}…"


def value_text(value: Any) -> str:
    """As a user would write it: `none`, `true`, `false`, or its text."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a table of cells as text. The columns with these numbers are aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.ljust if number in left else str.rjust for number in range(len(widths))]
    lines = ("  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def some_of(names: Sequence[object], shown: int = 1) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(str, names[:shown])) + more


def named_values(words: Iterable[str]) -> dict[str, Any]:
    """Return the values of words such as `factor=8`. They are JSON, or texts if they are not. ValueError: not such a word."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or name in values:
            raise ValueError(f"{word!r} is not NAME=VALUE, or its NAME occurs twice")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
