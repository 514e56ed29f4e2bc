"""What the pages, the data card and the terminal need of the report in a manifest, any part of which can be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.text import share

_FEW_CUT = 0.01  # a row length is sufficient if at most this share of the documents is longer


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


def truncation_advice(truncation: Sequence[Mapping[str, Any]], row_length: int) -> str:
    """Return a table of `compare_row_lengths` in words: the effect of the set row length, and the smallest sufficient one."""
    by_length = {row["row_length"]: row for row in truncation}
    chosen = by_length.get(row_length)
    if chosen is None:
        return ""
    whole = {length: "all" if not row["documents_cut"] else share(1 - row["cut_rate"]) for length, row in by_length.items()}
    words = f"Rows of {row_length:,} tokens (as set) hold {whole[row_length]} of the documents uncut"
    if chosen["documents_cut"]:
        kept = share(chosen["kept_rate"])
        words += f". Truncation of the others would keep {kept} of all tokens. Packing cuts them and keeps all tokens"
    enough = min((length for length, row in by_length.items() if row["cut_rate"] <= _FEW_CUT), default=row_length)
    if enough > row_length:
        kept = share(by_length[enough]["kept_rate"])
        words += f". Rows of {enough:,} would hold {whole[enough]} uncut and keep {kept} of all tokens if truncated"
    elif enough < row_length:
        words += f". Rows of {enough:,} would already hold {whole[enough]} uncut"
    return f"{words}. With one document per row, {share(1 - chosen['one_per_row_fill'])} of all positions would be padding."
