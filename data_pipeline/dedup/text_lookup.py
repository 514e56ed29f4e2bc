"""Reads texts by document id from memory-mapped files, of which a limited number is open."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.dataset.tables import read_batches
from data_pipeline.documents import partition_of

__all__ = ["Texts"]

_OPEN_FILES = 64


class Texts:
    """The texts of all partitions. Memory use is bounded, because the operating system can drop mapped pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, tuple[list[int], list[pa.RecordBatch]]] = {}

    def place(self, identity: int) -> tuple[str, int]:
        batch, row = self._row(identity)
        return batch.column("path")[row].as_py(), batch.column("line")[row].as_py()

    def read(self, identity: int) -> bytes:
        text: bytes = self._find(identity).to_pybytes()
        return text

    def size(self, identity: int) -> int:
        return int(self._find(identity).size)

    def _find(self, identity: int) -> pa.Buffer:
        batch, row = self._row(identity)
        return batch.column("text")[row].as_buffer()

    def _row(self, identity: int) -> tuple[pa.RecordBatch, int]:
        first_ids, batches = self._partition(partition_of(identity))
        place = bisect_right(first_ids, identity) - 1
        if place >= 0:
            ids = batches[place].column("id").to_numpy()
            row = int(np.searchsorted(ids, np.uint64(identity)))
            if row < len(ids) and ids[row] == identity:
                return batches[place], row
        raise KeyError(f"{self._folder}: no document with id {identity}")

    def _partition(self, number: int) -> tuple[list[int], list[pa.RecordBatch]]:
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            batches = [batch for batch in read_batches(self._folder / f"{number:06d}") if batch.num_rows]
            self._open[number] = [batch.column("id")[0].as_py() for batch in batches], batches
        return self._open[number]
