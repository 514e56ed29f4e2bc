"""Statistics of document lengths, from `{length: documents}`: percentiles, a histogram, and the cost of each row length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.text import share

PERCENTS = (50, 90, 95, 99)
_MAX_BINS = 40
_STEPS_PER_OCTAVE = (8, 6, 4, 3, 2, 1)
_SHORTEST_ROW = 128
_FEW_CUT = 0.01  # a row length is sufficient if at most this share of the documents is longer

Int64s = NDArray[np.int64]


def describe_lengths(count_of_length: Mapping[str, int]) -> dict[str, Any]:
    """With a histogram of `[low, high, documents, units]`: low <= length < high, and the sum of their lengths."""
    lengths, counts = _sorted(count_of_length)
    return {
        "documents": int(counts.sum()),
        "total": int((lengths * counts).sum()),
        **percentiles(count_of_length),
        "histogram": _histogram(lengths, counts),
    }


def percentiles(count_of_length: Mapping[str, int]) -> dict[str, Any]:
    """By nearest rank, and mean and maximum: the smallest length so that at least that share of the documents is not longer."""
    lengths, counts = _sorted(count_of_length)
    if not len(lengths):
        return {"mean": 0.0, "max": 0, **{f"p{percent}": 0 for percent in PERCENTS}}
    ends = np.cumsum(counts)
    ranks = {percent: -(-int(ends[-1]) * percent // 100) for percent in PERCENTS}
    return {
        "mean": round(int((lengths * counts).sum()) / int(ends[-1]), 3),
        "max": int(lengths[-1]),
        **{f"p{percent}": int(lengths[np.searchsorted(ends, rank)]) for percent, rank in ranks.items()},
    }


def compare_row_lengths(count_of_length: Mapping[str, int], row_length: int) -> list[dict[str, Any]]:
    """Candidates are `row_length` and the powers of two from 128 to the first that is not below P99. A longer document is
    truncated (`kept_rate`), or cut as packing does; fields about rows and padding assume one piece per row.
    """
    lengths, counts = _sorted(count_of_length)
    total = int((lengths * counts).sum())
    documents = int(counts.sum())
    return [_cost_of_rows(lengths, counts, documents, total, candidate) for candidate in _candidates(count_of_length, row_length)]


def truncation_advice(truncation: Sequence[Mapping[str, Any]], row_length: int) -> str:
    """Return the result of `compare_row_lengths` in words: the effect of the set row length, and the smallest sufficient one."""
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


def _histogram(lengths: Int64s, counts: Int64s) -> list[list[int]]:
    if not len(lengths):
        return []
    borders = log_borders(int(lengths[0]), int(lengths[-1]))
    places = np.searchsorted(lengths, borders)
    documents = np.diff(np.append(0, np.cumsum(counts))[places])
    units = np.diff(np.append(0, np.cumsum(lengths * counts))[places])
    return np.column_stack((borders[:-1], borders[1:], documents, units)).tolist()  # type: ignore[no-any-return]


def _candidates(count_of_length: Mapping[str, int], row_length: int) -> list[int]:
    enough = max(percentiles(count_of_length)["p99"], _SHORTEST_ROW)
    powers = [1 << exponent for exponent in range(_SHORTEST_ROW.bit_length() - 1, (enough - 1).bit_length() + 1)]
    return sorted({row_length, *powers})


def _cost_of_rows(lengths: Int64s, counts: Int64s, documents: int, total: int, row_length: int) -> dict[str, Any]:
    cut = int(counts[lengths > row_length].sum())
    kept = int((np.minimum(lengths, row_length) * counts).sum())
    pieces = np.maximum(1, -(-(lengths - 1) // (row_length - 1)))
    rows = int((pieces * counts).sum())
    placed = total + rows - documents  # each further piece repeats one token
    return {
        "row_length": row_length,
        "documents_cut": cut,
        "cut_rate": share_of(cut, documents),
        "tokens_kept_if_truncated": kept,
        "kept_rate": share_of(kept, total),
        "rows": rows,
        "padding_if_one_document_per_row": rows * row_length - placed,
        "one_per_row_fill": share_of(placed, rows * row_length),
    }


def _sorted(count_of_length: Mapping[str, int]) -> tuple[Int64s, Int64s]:
    """Return the lengths in ascending order, and the number of documents of each. The keys are strings, as in JSON."""
    lengths = np.fromiter(map(int, count_of_length), np.int64, len(count_of_length))
    counts = np.fromiter(count_of_length.values(), np.int64, len(count_of_length))
    order = np.argsort(lengths)
    return lengths[order], counts[order]


def share_of(part: int, whole: int) -> float:
    """Rounded to six decimals; 0 if `whole` is 0."""
    return round(part / whole, 6) if whole else 0.0
