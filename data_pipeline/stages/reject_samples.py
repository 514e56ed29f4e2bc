from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.dedup.pairs import Texts
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.stages.job import PartitionTask

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


class LaterRejection(NamedTuple):
    """A document that was kept while reading."""

    id: int
    reason: Reason
    detail: str
    leader: int  # id of the document that is kept instead of a duplicate; else its own


def first_samples(task: PartitionTask, rejected: Iterator[LaterRejection]) -> Iterator[dict[str, Any]]:
    """Yield the first documents of each reason. Those of duplicates have id, path and line of the kept document as `kept`."""
    shown: Counter[Reason] = Counter()
    texts = Texts(task.work / "text")

    def is_wanted(one: LaterRejection) -> bool:
        shown[one.reason] += 1
        return shown[one.reason] <= SAMPLES_PER_REASON

    for text, row, one in find_rows(task.place("text"), filter(is_wanted, rejected)):
        path, line, content = (text.column(name)[row].as_py() for name in ("path", "line", "text"))
        kept = {"kept": [one.leader, *texts.place(one.leader)]} if one.leader != one.id else {}
        yield Rejection.of(Document(content, path, line, 0), one.reason, one.detail).shown | kept


def find_rows(text: Path, wanted: Iterator[LaterRejection]) -> Iterator[tuple[pa.RecordBatch, int, LaterRejection]]:
    """Yield batch and row in a text table of rejected documents, which are in ascending order of their ids like the table."""
    one = next(wanted, None)
    for batch in read_batches(text):
        ids_D = batch.column("id").to_numpy()
        while one is not None and one.id <= ids_D[-1]:
            yield batch, int(np.searchsorted(ids_D, one.id)), one
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
