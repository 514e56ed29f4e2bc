"""What a compression costs: bytes on the disk and perplexity, before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.text import columns, format_bytes


@dataclass(frozen=True)
class Measured:
    weight_bytes: int  # bytes of the stored tensors
    perplexity: float | None  # perplexity on the validation data; None if the data is not there


def table(before: Measured, after: Measured) -> str:
    rows = [
        ("", "before", "after", "change"),
        _row("on disk", before.weight_bytes, after.weight_bytes, format_bytes),
        _row("perplexity", before.perplexity, after.perplexity, lambda value: f"{value:.4g}"),
    ]
    return columns(rows)


def _row(name: str, before: float | None, after: float | None, shown: Callable[[Any], str]) -> tuple[str, str, str, str]:
    if before is None or after is None:
        return name, "-", "-", "no data"
    return name, shown(before), shown(after), f"{after / before - 1:+.1%}" if before else "-"
