from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def round_trip(tokenizer: Mapping[str, Any]) -> str:
    """Return a sentence about whether decoding gives the texts back; "" if the report does not contain this."""
    failures, unknown = tokenizer.get("round_trip_failures"), tokenizer.get("unknown")
    if failures is None:
        return ""
    if failures:
        return f"{failures:,} of the tried texts do not decode to the original"
    if unknown:
        return f"all tried texts decode to the original, but {unknown:,} tokens are unknown and their text is lost"
    return "all tried texts decode to the original"


def known(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: known(value) if isinstance(value, Mapping) else value for name, value in report.items() if value is not None}


def lookup(report: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Empty if there is no such table. A report leaves out what was not requested."""
    for name in names:
        report = report.get(name) or {}
    return dict(report)


def by_extension(report: Mapping[str, Any], name: str) -> list[tuple[str, str, int]]:
    """Return reason, extension and number of the `ignored` files or `malformed` documents, the most frequent first."""
    found = [(reason, ending, count) for reason in lookup(report, name) for ending, count in lookup(report, name, reason).items()]
    return sorted(found, key=lambda one: (-one[2], one[:2]))


def largest_first(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """A stored report has no such order."""
    return dict(sorted(entries.items(), key=lambda item: (-(item[1].get(name) or 0), item[0])))
