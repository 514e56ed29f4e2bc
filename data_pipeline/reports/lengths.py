"""How long documents are, from counts by length: exact percentiles, a histogram, and what each length of row would cost.

Everything is computed from `{length: documents}`, so the cost grows with the number of different lengths and not of documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.text import share

__all__ = ["PERCENTS", "compare_row_lengths", "describe_lengths", "log_borders", "percentiles", "share_of", "truncation_advice"]

PERCENTS = (50, 90, 95, 99)
_MAX_BINS = 40
_STEPS_PER_OCTAVE = (8, 6, 4, 3, 2, 1)
_SHORTEST_ROW = 128
_FEW_CUT = 0.01
"""A row length is called sufficient where at most this share of the documents is longer."""

Int64s = NDArray[np.int64]


def describe_lengths(count_of_length: Mapping[str, int]) -> dict[str, Any]:
    """Number of documents, their total length, mean, P50, P90, P95, P99, longest, and a histogram with logarithmic borders.

    The histogram's bins are `[low, high, documents, units]`: documents with low <= length < high, and the sum of their lengths.
    """
    lengths, counts = _sorted(count_of_length)
    return {
        "documents": int(counts.sum()),
        "total": int((lengths * counts).sum()),
        **percentiles(count_of_length),
        "histogram": _histogram(lengths, counts),
    }


def percentiles(count_of_length: Mapping[str, int]) -> dict[str, Any]:
    """Exact P50, P90, P95 and P99 by nearest rank (the least length that holds that share whole), with mean and longest."""
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
    """What rows of each candidate length do to documents of these lengths in tokens; the candidates are `row_length`, which is
    set, and the powers of two from 128 to the first that holds P99.

    A document longer than a row is either truncated, which loses its end (`kept_rate`), or cut into pieces that overlap by one
    token, as packing does, which loses nothing. `rows`, `padding_if_one_document_per_row` and `one_per_row_fill` are those of
    rows with one piece each.
    """
    lengths, counts = _sorted(count_of_length)
    total = int((lengths * counts).sum())
    documents = int(counts.sum())
    return [_cost_of_rows(lengths, counts, documents, total, candidate) for candidate in _candidates(count_of_length, row_length)]


def truncation_advice(truncation: Sequence[Mapping[str, Any]], row_length: int) -> str:
    """What `compare_row_lengths` found, in words: what the length that is set does, and which would cut hardly any document."""
    by_length = {row["row_length"]: row for row in truncation}
    chosen = by_length.get(row_length)
    if chosen is None:
        return ""
    whole = {length: "all" if not row["documents_cut"] else share(1 - row["cut_rate"]) for length, row in by_length.items()}
    words = f"Rows of {row_length:,} tokens, as set, hold {whole[row_length]} of the documents whole"
    if chosen["documents_cut"]:
        words += (
            f"; truncating the others would keep {share(chosen['kept_rate'])} of all tokens, while packing cuts them and keeps all"
        )
    enough = min((length for length, row in by_length.items() if row["cut_rate"] <= _FEW_CUT), default=row_length)
    if enough > row_length:
        words += f". {enough:,} would hold {whole[enough]} and keep {share(by_length[enough]['kept_rate'])} if truncated"
    elif enough < row_length:
        words += f". {enough:,} would hold {whole[enough]} already"
    return f"{words}. With one document to a row, {share(1 - chosen['one_per_row_fill'])} of the rows would be padding."


def log_borders(low: int, high: int) -> Int64s:
    """Whole numbers from at most `low` to above `high` that grow by one factor, 2 or the root of it that gives at most 40 bins.

    Powers of two are always among them, as those are the usual row lengths.
    """
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
    placed = total + rows - documents  # a piece that goes on repeats one token
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
    """The lengths, rising, and how many documents have each; keys are strings, as in JSON."""
    lengths = np.fromiter(map(int, count_of_length), np.int64, len(count_of_length))
    counts = np.fromiter(count_of_length.values(), np.int64, len(count_of_length))
    order = np.argsort(lengths)
    return lengths[order], counts[order]


def share_of(part: int, whole: int) -> float:
    """Return `part / whole` with six decimals; 0 if there is no whole."""
    return round(part / whole, 6) if whole else 0.0
