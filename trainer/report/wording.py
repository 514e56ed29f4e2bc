"""How numbers, times and strangers' text are shown in a report."""

from __future__ import annotations

import math
import unicodedata

__all__ = ["count", "decimal", "duration", "rate", "share", "short", "size", "visible"]

_UNSEEN = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"))
"""Unicode categories of characters that show nothing, or that change how others are shown."""


def count(value: float) -> str:
    """A whole number with its thousands set apart: `1,234,567`."""
    return f"{value:,.0f}" if math.isfinite(value) else str(value)


def decimal(value: float) -> str:
    """A measured number with five digits: `2.3456`, `0.00012346`, `1.2e+09`, `nan`."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.5g}"


def short(value: float) -> str:
    """A number for an axis: `0.25`, `1.5k`, `20M`, `1e-05`."""
    for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1000 * unit and (abs(value) >= 1e4 or value % 1000 == 0):
            return f"{value / unit:.4g}{sign}"
    return f"{value:.4g}"


def rate(per_second: float) -> str:
    """Tokens a second: `812`, `24.1k`, `1.25M`."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_second) >= 0.9995 * unit:  # what would be rounded to a thousand of the smaller unit is one of this
            return f"{per_second / unit:.3g}{sign}"
    return f"{per_second:.3g}"


def share(of_one: float) -> str:
    """A share from 0 to 1 in per cent: `12.3 %`, and `< 0.1 %` for what is more than nothing."""
    return "< 0.1 %" if 0 < of_one < 0.0005 else f"{100 * of_one:.1f} %"


def size(num_bytes: float) -> str:
    """Bytes in decimal units: `517 bytes`, `1.2 kB`, `3.4 TB`."""
    if num_bytes < 1000:
        return f"{num_bytes:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"


def duration(seconds: float) -> str:
    """A time: `0.4 s`, `45 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
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
    """Text in which every character that a reader would not see, or that would disturb the rest of the line, is named: `⟨U+202E⟩`.

    Line feeds and tabs stay. What comes back holds no control character, no direction mark and no lone surrogate, so it can go into
    UTF-8 and into a page.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) not in _UNSEEN else f"⟨U+{ord(character):04X}⟩"
        for character in text
    )
