"""Parts of a report on prepared data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flat", "known", "largest_first", "part", "round_trip"]


def round_trip(tokenizer: Mapping[str, Any]) -> str:
    """Whether texts come back from their tokens, as far as the report of a tokenizer tells; empty where it does not.

    The first few documents of each partition are tried; unknown tokens are counted in all of them.
    """
    failures, unknown = tokenizer.get("round_trip_failures"), tokenizer.get("unknown")
    if failures is None:
        return ""
    if failures:
        return f"{failures:,} of the texts that were tried do not come back exactly"
    if unknown:
        return f"every text that was tried comes back exactly, but {unknown:,} tokens are unknown, whose texts do not"
    return "every text that was tried comes back exactly"


def known(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report without what is None, at any depth of its tables: whoever shows it need only ask what is there."""
    return {name: known(value) if isinstance(value, Mapping) else value for name, value in report.items() if value is not None}


def part(report: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """What stands under these names, one in the other; empty where there is nothing, as what was not asked for is not reported."""
    for name in names:
        report = report.get(name) or {}
    return dict(report)


def largest_first(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The entries with the largest number under `name` first; a report itself keeps no order."""
    return dict(sorted(entries.items(), key=lambda item: (-(item[1].get(name) or 0), item[0])))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted name; an empty mapping is a value too."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
