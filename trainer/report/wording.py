"""How numbers, times and strangers' text are shown in a report."""

from __future__ import annotations

import math

__all__ = ["count", "rate", "share"]


def count(value: float) -> str:
    """A whole number with its thousands set apart: `1,234,567`."""
    return f"{value:,.0f}" if math.isfinite(value) else str(value)


def rate(per_second: float) -> str:
    """Tokens a second: `812`, `24.1k`, `1.25M`."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_second) >= 0.9995 * unit:  # what would be rounded to a thousand of the smaller unit is one of this
            return f"{per_second / unit:.3g}{sign}"
    return f"{per_second:.3g}"


def share(of_one: float) -> str:
    """A share from 0 to 1 in per cent: `12.3 %`, and `< 0.1 %` for what is more than nothing."""
    return "< 0.1 %" if 0 < of_one < 0.0005 else f"{100 * of_one:.1f} %"
