"""Shards: Arrow IPC files with one packed sequence in each row, written once and read memory-mapped.

    tokens     fixed_size_list<uint16 or uint32>[L]   the row; what the segments leave over at its end is padding
    segments   list<uint32>                           lengths of the documents in the row, in order; their sum is at most L
    documents  list<uint64>                           their ids, one for each segment

A shard is uncompressed and has one record batch, so its three columns are arrays that are mapped as they lie in the file.

Shape suffixes: B rows of a request, R rows of a shard, L tokens of a row, S segments of all rows together.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

import logging
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.errors import PreparedDataError
from data_pipeline.files import digest_file
from data_pipeline.manifest import Manifest, ShardEntry

__all__ = ["RowBatch", "Rows", "ShardContent", "token_type", "write_shard"]

logger = logging.getLogger(__name__)

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds every id of a vocabulary: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class ShardContent:
    """The rows of a shard, as arrays."""

    tokens_RL: Tokens
    segments_S: NDArray[np.uint32]
    documents_S: NDArray[np.uint64]
    num_segments_R: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.segments_S.sum(dtype=np.int64))

    @property
    def num_targets(self) -> int:
        """Tokens that follow another one of their document."""
        return int((np.maximum(self.segments_S, 1) - 1).sum(dtype=np.int64))


@dataclass(frozen=True)
class RowBatch:
    """Some rows, side by side."""

    tokens_BL: Tokens
    segments_BL: NDArray[np.int32]
    """Number of the document within its row, from 0; -1 on padding."""


def write_shard(path: Path, content: ShardContent) -> None:
    """Writes a shard; the caller gives it its final name."""
    num_rows, row_length = content.tokens_RL.shape
    offsets = pa.array(np.concatenate([[0], np.cumsum(content.num_segments_R)]).astype(np.int32))
    columns = {
        "tokens": pa.FixedSizeListArray.from_arrays(pa.array(content.tokens_RL.reshape(-1)), row_length),
        "segments": pa.ListArray.from_arrays(offsets, pa.array(content.segments_S)),
        "documents": pa.ListArray.from_arrays(offsets, pa.array(content.documents_S)),
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    assert batch.num_rows == num_rows
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


class Rows:
    """The rows of one split, across its shards in the order of the manifest.

    A shard is opened at first use: its size, and with `verify` its digest, is checked then, once. Before each later use it is
    asked whether the file is still the one that was checked: a mapping of a file that became shorter would end this process.

    Raises:
        PreparedDataError: from every reading method, when a shard is missing or not what the manifest says.
        OSError: from every reading method, with the shard's path as its `filename`; a later call opens the shard again.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, *, verify: bool = True) -> None:
        self.row_length = manifest.row_length
        self._directory = directory
        self._manifest = manifest
        self._verify = verify
        self._token_type = np.dtype(manifest.token_type)
        self._entries = [shard for shard in manifest.shards if shard.split == split]
        self._ends = np.cumsum([shard.rows for shard in self._entries], dtype=np.int64)
        self._source_of_shard = np.array([manifest.sources.index(shard.source) for shard in self._entries], np.int64)
        self._open: dict[int, _OpenShard] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        """The rows with these numbers, in the order asked for: tokens and segments of shape [B, L]."""
        by_shard = self._by_shard(indices)
        if len(by_shard) == 1:  # spares a copy
            [(shard, _, rows)] = by_shard
            return RowBatch(shard.tokens_RL[rows], shard.segment_numbers(rows))
        tokens_BL = np.empty((len(indices), self.row_length), self._token_type)
        segments_BL = np.empty((len(indices), self.row_length), np.int32)
        for shard, chosen, rows in by_shard:
            tokens_BL[chosen] = shard.tokens_RL[rows]
            segments_BL[chosen] = shard.segment_numbers(rows)
        return RowBatch(tokens_BL, segments_BL)

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Targets in each of these rows, shape [B]; no token is read."""
        targets_B = np.empty(len(indices), np.int64)
        for shard, chosen, rows in self._by_shard(indices):
            targets_B[chosen] = shard.targets_R[rows]
        return targets_B

    def num_sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Documents, or pieces of them, with at least one target in each of these rows, shape [B]; no token is read."""
        sequences_B = np.empty(len(indices), np.int64)
        for shard, chosen, rows in self._by_shard(indices):
            sequences_B[chosen] = shard.sequences_R[rows]
        return sequences_B

    def source_ids(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source of each of these rows, as an index into the manifest's `sources`, shape [B]; no file is read."""
        self._check(indices)
        return self._source_of_shard[np.searchsorted(self._ends, indices, side="right")]

    def source_ranges(self) -> list[NDArray[np.int64]]:
        """The rows of each of the manifest's sources, as rising ranges (first, end), shape [ranges, 2]; no file is read."""
        ranges: list[list[list[int]]] = [[] for _ in self._manifest.sources]
        for source, end, entry in zip(self._source_of_shard, self._ends.tolist(), self._entries, strict=True):
            found, first = ranges[source], end - entry.rows
            if found and found[-1][1] == first:
                found[-1][1] = end
            elif entry.rows:
                found.append([first, end])
        return [np.array(found, np.int64).reshape(-1, 2) for found in ranges]

    def document_ids(self, index: int) -> NDArray[np.uint64]:
        """The ids of the documents in one row, in order."""
        [(shard, _, rows)] = self._by_shard(np.array([index]))
        return shard.document_ids(int(rows[0]))

    def _by_shard(self, indices: NDArray[np.int64]) -> list[tuple[_OpenShard, Any, NDArray[np.int64]]]:
        """Each shard that is needed, with the places in the request that it fills and its own rows for them."""
        self._check(indices)
        shards_B = np.searchsorted(self._ends, indices, side="right")
        numbers = np.unique(shards_B)
        if len(numbers) == 1:
            return [self._rows_of(int(numbers[0]), slice(None), indices)]
        chosen = [np.flatnonzero(shards_B == number) for number in numbers]
        return [self._rows_of(int(number), places, indices[places]) for number, places in zip(numbers, chosen, strict=True)]

    def _rows_of(self, number: int, chosen: Any, indices: NDArray[np.int64]) -> tuple[_OpenShard, Any, NDArray[np.int64]]:
        try:
            shard = self._open.get(number)
            if shard is None:
                shard = _OpenShard(self._directory, self._entries[number], self._manifest, verify=self._verify)
                self._open[number] = shard
            shard.check_unchanged()
        except OSError as error:
            # A handle that a network file system declared stale stays so: the next try opens the shard afresh.
            self._open.pop(number, None)
            error.filename = error.filename or str(self._directory / self._entries[number].path)
            raise
        return shard, chosen, indices - (self._ends[number] - self._entries[number].rows)

    def _check(self, indices: NDArray[np.int64]) -> None:
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} asked of {len(self)}")


class _OpenShard:
    """One shard, mapped into memory."""

    def __init__(self, directory: Path, entry: ShardEntry, manifest: Manifest, *, verify: bool) -> None:
        path = directory / entry.path
        _check_file(path, entry, verify=verify)
        self._path = path
        # A mapping outlives the file's name, so preparing again beside a running trainer does not disturb it.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._look()
        try:
            mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
            reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapping)))
            if reader.num_record_batches != 1:
                raise ValueError(f"{reader.num_record_batches} record batches where one is expected")
            batch = reader.get_batch(0)
            batch.validate(full=True)  # offsets that lead outside would crash this process
            columns = {name: batch.column(name) for name in ("tokens", "segments", "documents")}
            tokens = columns["tokens"].values.to_numpy(zero_copy_only=True)
            self.tokens_RL: Tokens = tokens.reshape(entry.rows, manifest.row_length)
            self._offsets = columns["segments"].offsets.to_numpy().astype(np.int64)
            self._lengths_S = columns["segments"].values.to_numpy()
            self._documents_S = columns["documents"].values.to_numpy()
        except (pa.ArrowInvalid, KeyError, ValueError, AttributeError) as error:
            raise PreparedDataError(f"{path}: not a shard that can be read ({error}); run `prepare` again") from None
        self.targets_R = self._sum_by_row(np.maximum(self._lengths_S.astype(np.int64), 1) - 1)
        self.sequences_R = self._sum_by_row(self._lengths_S > 1)

    def check_unchanged(self) -> None:
        """Refuses to read on when the file was written to or cut short since it was opened."""
        if self._look() != self._state:
            raise PreparedDataError(
                f"{self._path}: this shard was changed while it was read ({self._look()[0]} bytes now, "
                f"{self._state[0]} before); something else writes to it: stop that and run `prepare` again"
            )

    def _sum_by_row(self, values_S: NDArray[Any]) -> NDArray[np.int64]:
        before = np.concatenate([[0], np.cumsum(values_S, dtype=np.int64)])
        sums: NDArray[np.int64] = before[self._offsets[1:]] - before[self._offsets[:-1]]
        return sums

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def segment_numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Number of the document at every position of these rows, -1 on padding: shape [B, L]."""
        row_length = self.tokens_RL.shape[1]
        firsts, ends = self._offsets[rows], self._offsets[rows + 1]
        # One entry more than there are segments in each row: the padding.
        entries_B = ends - firsts + 1
        last = np.cumsum(entries_B) - 1
        numbers = np.arange(int(entries_B.sum()), dtype=np.int64) - np.repeat(last - entries_B + 1, entries_B)
        source = np.minimum(np.repeat(firsts, entries_B) + numbers, max(len(self._lengths_S) - 1, 0))
        lengths = self._lengths_S[source].astype(np.int64)
        lengths[last] = 0
        totals = np.add.reduceat(lengths, last - entries_B + 1)
        lengths[last] = row_length - totals
        numbers[last] = -1
        return np.repeat(numbers.astype(np.int32), lengths).reshape(len(rows), row_length)

    def document_ids(self, row: int) -> NDArray[np.uint64]:
        """The ids of the documents in a row."""
        ids: NDArray[np.uint64] = self._documents_S[self._offsets[row] : self._offsets[row + 1]]
        return ids


def _check_file(path: Path, entry: ShardEntry, *, verify: bool) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise PreparedDataError(f"{path}: this shard is missing; run `prepare` again") from None
    if size != entry.bytes:
        raise PreparedDataError(
            f"{path}: {size} bytes, but the manifest says {entry.bytes}; the shard is damaged: run `prepare` again"
        )
    if verify and (digest := digest_file(path)) != entry.sha256:
        raise PreparedDataError(
            f"{path}: {digest}, but the manifest says {entry.sha256}; the shard is damaged: run `prepare` again"
        )
