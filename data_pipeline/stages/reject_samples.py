"""The documents that the report shows of those that were rejected after they were read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from data_pipeline.documents import Document, Reason, Rejection

__all__ = ["SAMPLES_PER_REASON", "Samples", "rejection_of_row"]

SAMPLES_PER_REASON = 10
"""Of each partition."""


class Samples:
    """The first rejected documents of each reason."""

    def __init__(self) -> None:
        self._shown: Counter[Reason] = Counter()
        self.values: list[dict[str, Any]] = []

    def wanted(self, rejected: Iterable[tuple[int, Reason]]) -> Iterator[tuple[int, Reason]]:
        """Those of the rejected rows that are to be shown; each counts as shown."""
        for row, reason in rejected:
            if self._shown[reason] < SAMPLES_PER_REASON:
                self._shown[reason] += 1
                yield row, reason

    def add(self, rejection: Rejection) -> None:
        """One that is shown."""
        self.values.append(asdict(rejection))


def rejection_of_row(text: pa.RecordBatch, row: int, reason: Reason, detail: str) -> Rejection:
    """What is said of a row of the text table."""
    path, line, content = (text.column(name)[row].as_py() for name in ("path", "line", "text"))
    return Rejection.of(Document(content, path, line, 0), reason, detail)
