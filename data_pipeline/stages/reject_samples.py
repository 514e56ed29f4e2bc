"""Samples of the documents that a stage after reading rejects, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from data_pipeline.documents import Document, Reason, Rejection

__all__ = ["SAMPLES_PER_REASON", "Samples"]

SAMPLES_PER_REASON = 10
"""Most samples of each reason in one partition."""


class Samples:
    """The first rejected documents of each reason."""

    def __init__(self) -> None:
        self._shown: Counter[Reason] = Counter()
        self.values: list[dict[str, Any]] = []

    def wanted(self, rejected: Iterable[tuple[int, Reason]]) -> Iterator[tuple[int, Reason]]:
        """Yield those rejected rows that become samples, and count them as taken."""
        for row, reason in rejected:
            if self._shown[reason] < SAMPLES_PER_REASON:
                self._shown[reason] += 1
                yield row, reason

    def add(self, text: pa.RecordBatch, row: int, reason: Reason, detail: str) -> None:
        """Add one row of the text table."""
        path, line, content = (text.column(name)[row].as_py() for name in ("path", "line", "text"))
        self.values.append(asdict(Rejection.of(Document(content, path, line, 0), reason, detail)))
