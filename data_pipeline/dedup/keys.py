"""Stores the keys of every document twice: in the order of the documents, and as sorted runs from which a range of keys is read.

An entry is 16 bytes: a key, the document's place in the partition, and 32 more bits of its digest. A document has one entry for
its digest and one for each band. Two documents are equal if 95 bits of their digests are equal. Among 10^10 documents, the
probability that this holds for any two different documents is one in 800 million.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.dedup.signatures import DIGEST_BYTES, Keys

__all__ = ["ENTRIES_SCHEMA", "KEYS_SCHEMA", "KeyWriter", "entries_path", "fixed_bytes", "make_entries", "read_digests", "read_keys"]

KEYS_SCHEMA = pa.schema([("id", pa.uint64()), ("digest", pa.binary(DIGEST_BYTES)), ("overlaps", pa.uint32())])
"""One row for each row of the text table. `overlaps` is the number of runs of words shared with a benchmark."""
ENTRIES_SCHEMA = pa.schema([("key", pa.uint64()), ("check", pa.uint32()), ("ordinal", pa.uint32())])
"""Each record batch is a run in ascending order of the keys. The lowest bit of a key is 1 for digests and 0 for bands."""

_RUN_DOCUMENTS = 1 << 16  # signed documents held in memory, about 300 bytes each


class KeyWriter:
    """A writer of the keys of a partition's documents, which must be added in ascending order of their ids."""

    def __init__(self, output: Path, settings: DedupConfig) -> None:
        self._settings = settings
        self._table = TableWriter(output, KEYS_SCHEMA)
        self._runs = TableWriter(entries_path(output), ENTRIES_SCHEMA)
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0

    def __enter__(self) -> KeyWriter:
        self._table.__enter__()
        self._runs.__enter__()
        return self

    @property
    def written(self) -> dict[Path, str]:
        return self._table.written | self._runs.written

    def add(self, ids: Sequence[int], keys: Keys, overlaps: Sequence[int] | NDArray[np.uint32] | None = None) -> None:
        """Add documents. Those that overlap with a benchmark are dropped anyway, so they get no entries."""
        ids_D = np.asarray(ids, np.uint64)
        overlaps_D = np.zeros(len(ids_D), np.uint32) if overlaps is None else np.asarray(overlaps, np.uint32)
        self._table.write(pa.record_batch([ids_D, fixed_bytes(keys.digests_D), overlaps_D], schema=KEYS_SCHEMA))
        if self._settings.exact:
            self._waiting.append(make_entries(ids_D, keys, overlaps_D < self._settings.benchmark_overlaps))
            self._num_waiting += len(ids_D)
        if self._num_waiting >= _RUN_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            key, check, ordinal = (column.to_numpy() for column in pa.Table.from_batches(self._waiting, ENTRIES_SCHEMA).columns)
            order = np.argsort(key, kind="stable")
            self._runs.write(pa.record_batch([key[order], check[order], ordinal[order]], schema=ENTRIES_SCHEMA))
        self._waiting, self._num_waiting = [], 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._runs.__exit__(kind, error, trace)
        self._table.__exit__(kind, error, trace)


def entries_path(keys: Path) -> Path:
    return keys.with_name(f"{keys.name}-entries")


def make_entries(ids_D: NDArray[np.uint64], keys: Keys, is_wanted_D: NDArray[np.bool_]) -> pa.RecordBatch:
    halves_D2 = np.ascontiguousarray(keys.digests_D).view(np.uint64).reshape(-1, 2)
    checks_D = halves_D2[:, 1].astype(np.uint32)
    ordinals_D = ids_D.astype(np.uint32)  # the lower half of an id
    is_similar_D = is_wanted_D & keys.has_words_D
    num_bands = keys.bands_DB.shape[1]
    columns = [
        np.concatenate([halves_D2[is_wanted_D, 0] | np.uint64(1), (keys.bands_DB[is_similar_D] & ~np.uint64(1)).ravel()]),
        np.concatenate([checks_D[is_wanted_D], np.repeat(checks_D[is_similar_D], num_bands)]),
        np.concatenate([ordinals_D[is_wanted_D], np.repeat(ordinals_D[is_similar_D], num_bands)]),
    ]
    return pa.record_batch(columns, schema=ENTRIES_SCHEMA)


def fixed_bytes(values: NDArray[np.void]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(DIGEST_BYTES), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def read_digests(column: pa.Array) -> NDArray[np.void]:
    digests = np.frombuffer(column.buffers()[1], f"V{DIGEST_BYTES}")
    return digests[column.offset : column.offset + len(column)]


def read_keys(path: Path) -> tuple[NDArray[np.uint64], NDArray[np.void], NDArray[np.uint32]]:
    ids, digests, overlaps = [np.empty(0, np.uint64)], [np.empty(0, f"V{DIGEST_BYTES}")], [np.empty(0, np.uint32)]
    for batch in read_batches(path):
        ids.append(batch.column("id").to_numpy())
        digests.append(read_digests(batch.column("digest")))
        overlaps.append(batch.column("overlaps").to_numpy())
    return np.concatenate(ids), np.concatenate(digests), np.concatenate(overlaps)
