from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.documents import Document, Reason, Rejection

ReasonT = TypeVar("ReasonT", bound=str)
SAMPLES_PER_REASON = 10  # most samples of each reason in one partition
REJECTED_TABLES = ("malformed", "judged")  # ends of names; each table is in ascending order of the ids
_ROW_BYTES = 256  # of a row besides its texts, which may be empty
_REJECTED_SCHEMA = pa.schema(
    [
        ("id", pa.uint64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("path", pa.string()),
        ("line", pa.uint32()),
        ("metadata", pa.string()),
        ("text", pa.large_binary()),
    ]
)


class Samples:
    def __init__(self) -> None:
        self._shown: Counter[Reason] = Counter()
        self.values: list[dict[str, Any]] = []

    def wanted(self, rejected: Iterable[tuple[int, Reason]]) -> Iterator[tuple[int, Reason]]:
        for row, reason in rejected:
            if self._shown[reason] < SAMPLES_PER_REASON:
                self._shown[reason] += 1
                yield row, reason

    def add(self, text: pa.RecordBatch, row: int, reason: Reason, detail: str) -> None:
        path, line, content = (text.column(name)[row].as_py() for name in ("path", "line", "text"))
        self.values.append(Rejection.of(Document(content, path, line, 0), reason, detail).shown)


def find_rows(
    text: Path, wanted: Iterator[tuple[int, ReasonT, str]]
) -> Iterator[tuple[pa.RecordBatch, int, tuple[int, ReasonT, str]]]:
    """Yield batch and row in a text table of rejected documents, which are in ascending order of their ids like the table."""
    one = next(wanted, None)
    for batch in read_batches(text):
        ids_D = batch.column("id").to_numpy()
        while one is not None and one[0] <= ids_D[-1]:
            yield batch, int(np.searchsorted(ids_D, one[0])), one
            one = next(wanted, None)


class RejectedWriter(ExitStack):
    """Without a path it writes nothing."""

    def __init__(self, output: Path | None) -> None:
        super().__init__()
        paths = {} if output is None else {end: output.with_name(f"{output.name}-{end}") for end in REJECTED_TABLES}
        self._tables = {end: self.enter_context(TableWriter(path, _REJECTED_SCHEMA)) for end, path in paths.items()}

    @property
    def written(self) -> dict[Path, str]:
        return {path: digest for table in self._tables.values() for path, digest in table.written.items()}

    def add(self, identity: int, item: Rejection) -> None:
        """Write the bytes that did not become a document, or the document as it was judged."""
        if self._tables:
            end, metadata, text = "malformed", "", item.data
            if item.document is not None:
                end, metadata, text = "judged", item.document.metadata, item.document.text.encode()
            row = (identity, item.reason.value, item.detail, item.path, item.line, metadata, text)
            self._tables[end].add(row, len(text) + len(metadata) + len(item.detail) + len(item.path) + _ROW_BYTES)
