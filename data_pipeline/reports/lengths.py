"""Statistics of document lengths, from `{length: documents}`: percentiles, a histogram, and the cost of each row length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from data_pipeline.text import Int64s

PERCENTS = (50, 90, 95, 99)
_MAX_BINS = 40
_STEPS_PER_OCTAVE = (8, 6, 4, 3, 2, 1)
_SHORTEST_ROW = 128


def describe_lengths(count_of_length: Mapping[str, int]) -> dict[str, Any]:
    """With a histogram of `[low, high, documents, units]`: low <= length < high, and the sum of their lengths."""
    lengths, counts = _sorted(count_of_length)
    documents, total = int(counts.sum()), int((lengths * counts).sum())
    histogram: list[list[int]] = []
    if documents:
        borders = log_borders(int(lengths[0]), int(lengths[-1]))
        places = np.searchsorted(lengths, borders)
        sums = (np.diff(np.append(0, np.cumsum(values))[places]) for values in (counts, lengths * counts))
        histogram = np.column_stack((borders[:-1], borders[1:], *sums)).tolist()
    return {
        "documents": documents,
        "total": total,
        "mean": round(total / documents, 3) if documents else 0.0,
        "max": int(lengths.max(initial=0)),
        **{f"p{percent}": 0 for percent in PERCENTS},
        **at_percents(count_of_length, PERCENTS),
        "histogram": histogram,
    }


def at_percents(count_of_value: Mapping[str, int], percents: Iterable[int]) -> dict[str, int]:
    """Return the smallest value so that at least that share of the documents is not above it. Without documents, nothing."""
    values, counts = _sorted(count_of_value)
    ends = np.cumsum(counts)
    ranks = {percent: -(-int(ends[-1]) * percent // 100) for percent in percents} if len(ends) else {}
    return {f"p{percent}": int(values[np.searchsorted(ends, rank)]) for percent, rank in ranks.items()}


def compare_row_lengths(count_of_length: Mapping[str, int], row_length: int) -> list[dict[str, Any]]:
    """Candidates are `row_length` and the powers of two from 128 to the first that is not below P99. A longer document is
    truncated (`kept_rate`), or cut as packing does; fields about rows and padding assume one piece per row.
    """
    lengths, counts = _sorted(count_of_length)
    total, documents = int((lengths * counts).sum()), int(counts.sum())
    enough = max(at_percents(count_of_length, (99,)).get("p99", 0), _SHORTEST_ROW)
    powers = [1 << exponent for exponent in range(_SHORTEST_ROW.bit_length() - 1, (enough - 1).bit_length() + 1)]
    table = []
    for candidate in sorted({row_length, *powers}):
        cut = int(counts[lengths > candidate].sum())
        kept = int((np.minimum(lengths, candidate) * counts).sum())
        rows = int((np.maximum(1, -(-(lengths - 1) // (candidate - 1))) * counts).sum())
        placed = total + rows - documents  # each further piece repeats one token
        table.append(
            {
                "row_length": candidate,
                "documents_cut": cut,
                "cut_rate": share_of(cut, documents),
                "tokens_kept_if_truncated": kept,
                "kept_rate": share_of(kept, total),
                "rows": rows,
                "padding_if_one_document_per_row": rows * candidate - placed,
                "one_per_row_fill": share_of(placed, rows * candidate),
            }
        )
    return table


def log_borders(low: int, high: int) -> Int64s:
    """Return whole numbers from at most `low` to above `high` by a factor of 2, or of its smallest root for up to 40 bins."""
    for steps in _STEPS_PER_OCTAVE:
        exponents = np.arange(steps * int(high).bit_length() + 1) / steps
        borders = np.unique(np.append(0, np.rint(np.exp2(exponents)))).astype(np.int64)
        first = int(np.searchsorted(borders, low, side="right")) - 1
        last = int(np.searchsorted(borders, high, side="right"))
        if last - first <= _MAX_BINS:
            break
    return borders[first : last + 1]


def _sorted(count_of_length: Mapping[str, int]) -> tuple[Int64s, Int64s]:
    """Return the lengths in ascending order, and the number of documents of each. The keys are strings, as in JSON."""
    lengths = np.fromiter(map(int, count_of_length), np.int64, len(count_of_length))
    counts = np.fromiter(count_of_length.values(), np.int64, len(count_of_length))
    order = np.argsort(lengths)
    return lengths[order], counts[order]


def share_of(part: int, whole: int) -> float:
    """Rounded to six decimals; 0 if `whole` is 0."""
    return round(part / whole, 6) if whole else 0.0
