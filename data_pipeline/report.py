"""Adds up what the stages counted: every document is kept or rejected for a reason, and the sums are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from data_pipeline.documents import Reason
from data_pipeline.partitions import Partition
from data_pipeline.split import SPLITS, Split
from data_pipeline.stages import PackResult, ReadResult, TokenizeResult

__all__ = ["collect_rejects", "make_report", "percentiles"]

_PERCENTS = (50, 90, 95, 99)
_MAX_SAMPLES_PER_REASON = 1000


def make_report(
    read: Sequence[ReadResult],
    tokenized: Sequence[TokenizeResult],
    packed: Sequence[tuple[Split, PackResult]],
    row_length: int,
) -> dict[str, Any]:
    """The report: counts by stage, reason, source and split. It holds no time, so it is part of the reproducible output."""
    documents = _documents(read)
    assert documents["read"] == documents["kept"] + documents["rejected"], "a document was neither kept nor rejected"
    return {
        "documents": documents,
        "rejected": _rejected(read),
        "cleaned": _sum(result.changes for result in read),
        "sources": {
            source: _documents([result for result in read if result.source == source])
            for source in dict.fromkeys(result.source for result in read)
        },
        "characters": percentiles(_sum(result.characters for result in read)),
        "tokens": {
            **percentiles(_sum(result.lengths for result in tokenized)),
            "total": sum(sum(result.tokens.values()) for result in tokenized),
            "unknown": sum(result.unknown for result in tokenized),
        },
        "rows": {split: _rows([result for side, result in packed if side == split], row_length) for split in SPLITS},
    }


def percentiles(count_of_length: Mapping[str, int]) -> dict[str, Any]:
    """Exact P50, P90, P95 and P99 of lengths given as counts, by nearest rank, with the longest and the mean."""
    if not count_of_length:
        return {"mean": 0.0, "max": 0, **{f"p{percent}": 0 for percent in _PERCENTS}}
    lengths = np.array(sorted(map(int, count_of_length)), np.int64)
    counts = np.array([count_of_length[str(length)] for length in lengths], np.int64)
    ends = np.cumsum(counts)
    ranks = {percent: -(-int(ends[-1]) * percent // 100) for percent in _PERCENTS}
    return {
        "mean": round(float((lengths * counts).sum() / ends[-1]), 3),
        "max": int(lengths[-1]),
        **{f"p{percent}": int(lengths[np.searchsorted(ends, rank)]) for percent, rank in ranks.items()},
    }


def collect_rejects(partitions: Sequence[Partition], read: Sequence[ReadResult]) -> Iterator[dict[str, Any]]:
    """A sample of the rejected documents in input order, with the line numbers of whole files instead of their ranges."""
    shown: Counter[str] = Counter()
    lines_before = 0
    for partition, result in zip(partitions, read, strict=True):
        lines_before = lines_before if partition.parts[0].start else 0
        for sample in result.samples:
            shown[sample["reason"]] += 1
            if shown[sample["reason"]] <= _MAX_SAMPLES_PER_REASON:
                yield {**sample, "source": result.source, "line": sample["line"] and sample["line"] + lines_before}
        lines_before += result.documents


def _documents(read: Sequence[ReadResult]) -> dict[str, Any]:
    kept = _sum(result.kept for result in read)
    return {
        "read": sum(result.documents for result in read),
        "kept": sum(kept.values()),
        **{split: kept.get(split, 0) for split in SPLITS},
        "rejected": sum(_sum(result.rejected for result in read).values()),
        "input_bytes": sum(result.input_bytes for result in read),
        "text_bytes": sum(_sum(result.bytes for result in read).values()),
    }


def _rejected(read: Sequence[ReadResult]) -> dict[str, dict[str, int]]:
    """Counts by stage and reason: `read` could not make a document of it, `judge` did not want it."""
    stages: dict[str, dict[str, int]] = {"read": {}, "judge": {}}
    for reason, count in _sum(result.rejected for result in read).items():
        stages["read" if Reason(reason).malformed else "judge"][reason] = count
    return stages


def _rows(packed: Sequence[PackResult], row_length: int) -> dict[str, Any]:
    shards = [shard for result in packed for shard in result.shards]
    rows = sum(shard["rows"] for shard in shards)
    tokens = sum(shard["tokens"] for shard in shards)
    documents = sum(result.documents for result in packed)
    cut = sum(result.cut_documents for result in packed)
    return {
        "rows": rows,
        "tokens": tokens,
        "targets": sum(shard["targets"] for shard in shards),
        "padding": rows * row_length - tokens,
        "fill_rate": _share(tokens, rows * row_length),
        "documents": documents,
        "cut_documents": cut,
        "cut_rate": _share(cut, documents),
        "repeated_tokens": tokens - sum(result.document_tokens for result in packed),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
