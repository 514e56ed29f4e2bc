"""What stands in the cells of the report's tables: a number in the form that suits it, or that it is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.text import decimal, share, size
from data_pipeline.reports.html_parts import Html, note

__all__ = [
    "NOTHING",
    "UNKNOWN",
    "Report",
    "bytes_of",
    "count_of",
    "decimal_of",
    "exact_share_of",
    "flat",
    "listed",
    "others",
    "share_of",
]

Report = Mapping[str, Any]

NOTHING = Html("")
UNKNOWN = "—"
_MAX_LISTED = 40
"""Sources and languages in a table; what is beyond is counted."""


def _shown(form: Callable[[Any], str]) -> Callable[[Report, str], str]:
    """A function from a table of the report and a name in it to what its cell says."""
    return lambda values, name: UNKNOWN if name not in values else form(values[name])


count_of = _shown("{:,}".format)
bytes_of = _shown(size)
share_of = _shown(share)
decimal_of = _shown(decimal)
exact_share_of = _shown(lambda value: f"{100 * value:.3f} %")


def listed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The first forty."""
    return dict(list(found.items())[:_MAX_LISTED])


def others(found: Mapping[str, Any]) -> Html:
    """How many more there are."""
    return note(f"and {len(found) - _MAX_LISTED:,} others, in report.json") if len(found) > _MAX_LISTED else NOTHING


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as names with dots, and their values in words."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _worded(value)


def _worded(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == {} else str(value)
