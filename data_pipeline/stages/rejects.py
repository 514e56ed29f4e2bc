"""Collects the rejected documents that the report lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from data_pipeline.documents import Reason
from data_pipeline.sources.inputs import Partition
from data_pipeline.stages.read import ReadResult
from data_pipeline.stages.select import SelectResult
from data_pipeline.stages.split import SplitResult

__all__ = ["collect_rejects"]


def collect_rejects(
    partitions: Sequence[Partition], read: Sequence[ReadResult], *later: Sequence[SplitResult | SelectResult], most: int = 1000
) -> Iterator[dict[str, Any]]:
    """Yield at most `most` rejected documents for each reason, by partition. Line numbers count from the start of the file."""
    shown: Counter[str] = Counter()
    lines_before = 0
    for partition, result, *others in zip(partitions, read, *later, strict=True):
        lines_before = lines_before if partition.parts[0].start else 0
        for sample in chain(result.samples, *(other.samples for other in others)):
            shown[sample["reason"]] += 1
            if shown[sample["reason"]] <= most:
                line = sample["line"] and sample["line"] + lines_before
                yield {**sample, "stage": Reason(sample["reason"]).stage, "source": result.source, "line": line}
        lines_before += result.documents
