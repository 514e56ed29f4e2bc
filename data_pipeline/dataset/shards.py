"""Shards: Arrow IPC files with one packed sequence in each row, written once and read memory-mapped, uncompressed in one batch.

    tokens     fixed_size_list<uint16 or uint32>[L]   the row; tokens after the last segment are padding
    segments   list<uint32>                           lengths of the documents in the row, in order; their sum is at most L
    documents  list<uint64>                           ids of the documents, one for each segment
    loss_runs  list<uint32>                           the loss mask of the row without padding (`packed-rows/3`); not in all shards

Shape suffixes: B requested rows, R rows of a shard, L tokens of a row, S segments of all rows of a shard.
"""

from __future__ import annotations

import copy
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common.errors import PreparedDataError
from common.text import visible
from data_pipeline.dataset.layout import LOSS_RUNS
from data_pipeline.dataset.loss_mask import LossMask, number_tokens
from data_pipeline.dataset.manifest import MASKED_FORMAT, Manifest, ShardEntry, distrust, open_listed
from data_pipeline.dataset.tables import open_arrow

logger = logging.getLogger(__name__)

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Int64s = NDArray[np.int64]
_AnswerT = TypeVar("_AnswerT")

_MAX_SHOWN = 300  # maximum number of characters of untrusted column names and types in a message


class ShardError(PreparedDataError):
    """A shard is missing or damaged. `shard` is its path in the manifest."""

    def __init__(self, shard: str, message: str) -> None:
        super().__init__(message)
        self.shard = shard


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest type for all ids of a vocabulary: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class ShardContent:
    tokens_RL: Tokens
    segments_S: NDArray[np.uint32]
    documents_S: NDArray[np.uint64]
    num_segments_R: Int64s
    mask: LossMask | None = None  # None: all tokens have a loss, and the shard has no column for it

    @staticmethod
    def of(batch: pa.RecordBatch) -> ShardContent:
        tokens, segments, documents = (batch.column(name) for name in ("tokens", "segments", "documents"))
        tokens_RL = tokens.flatten().to_numpy().reshape(len(tokens), -1)
        mask = LossMask.in_column(batch.column(LOSS_RUNS)) if LOSS_RUNS in batch.schema.names else None
        num_segments_R = np.diff(segments.offsets.to_numpy())
        return ShardContent(tokens_RL, segments.flatten().to_numpy(), documents.flatten().to_numpy(), num_segments_R, mask)

    @property
    def batch(self) -> pa.RecordBatch:
        offsets = _offsets(self.num_segments_R)
        columns = {
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(self.tokens_RL.reshape(-1)), self.tokens_RL.shape[1]),
            "segments": pa.ListArray.from_arrays(offsets, pa.array(self.segments_S)),
            "documents": pa.ListArray.from_arrays(offsets, pa.array(self.documents_S)),
        }
        if self.mask is not None:
            columns[LOSS_RUNS] = pa.ListArray.from_arrays(_offsets(self.mask.num_runs_B), pa.array(self.mask.runs_N))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    @property
    def num_tokens(self) -> int:
        return int(self.segments_S.sum(dtype=np.int64))

    @property
    def num_targets(self) -> int:
        return int(_num_targets_of(self.segments_S, self.num_segments_R, self.mask).sum())


@dataclass(frozen=True)
class RowBatch:
    tokens_BL: Tokens
    segments_BL: NDArray[np.int32]  # index of the document in its row, from 0; -1 for padding
    has_loss_BL: NDArray[np.bool_] | None = None  # whether a token has a loss if it is a target; None: every token
    targets_BL: Int64s | None = None  # in place of the next tokens, -100 without one; set by views


def write_shard(path: Path, content: ShardContent) -> None:
    batch = content.batch
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _offsets(counts_R: Int64s) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts_R)]).astype(np.int32))


def _num_targets_of(segments_S: NDArray[np.uint32], num_segments_R: Int64s, mask: LossMask | None) -> Int64s:
    if mask is None:
        return np.maximum(segments_S.astype(np.int64), 1) - 1
    return mask.num_targets(segments_S, num_segments_R)


class Rows:
    """The rows of one split, from all its shards in the order of the manifest. ShardError, OSError: from every reading method.

    Size and, with `verify`, digest are checked when a shard is opened. Each later use checks that the file has not changed, because
    reading a mapping of a truncated file ends this process. After an error the next use checks the digest.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, *, verify: bool = True) -> None:
        self.row_length = manifest.row_length
        self._directory = directory
        self._manifest = manifest
        self._verify = verify
        self._token_type = np.dtype(manifest.token_type)
        self._entries = [shard for shard in manifest.shards if shard.split == split]
        self._ends = np.cumsum([shard.rows for shard in self._entries], dtype=np.int64)
        self._firsts = self._ends - np.array([shard.rows for shard in self._entries], np.int64)
        self._source_of_shard = np.array([manifest.sources.index(shard.source) for shard in self._entries], np.int64)
        self._open: dict[int, _OpenShard] = {}
        self._suspect: set[int] = set()  # numbers of the shards that have failed once
        self._blank: frozenset[int] = frozenset()
        self._note: Callable[[ShardError | OSError], None] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def without(self, shards: Collection[str], note: Callable[[ShardError | OSError], None] | None = None) -> Rows:
        """The rows of these shards become padding. With `note`, rows whose read fails do too, and `note` gets the error."""
        rows = copy.copy(self)
        rows._blank = frozenset(number for number, entry in enumerate(self._entries) if entry.path in shards)
        rows._note = note
        return rows

    def shard_of(self, error: BaseException | None) -> str | None:
        if isinstance(error, ShardError):
            return error.shard
        if isinstance(error, OSError):
            paths = {str(self._directory / entry.path): entry.path for entry in self._entries}
            return paths.get(str(error.filename))
        return None

    def num_rows_in(self, shards: Collection[str], indices: Int64s) -> int:
        self._check(indices)
        chosen = [number for number, entry in enumerate(self._entries) if entry.path in shards]
        return int(np.isin(np.searchsorted(self._ends, indices, side="right"), chosen).sum())

    def read(self, indices: Int64s) -> RowBatch:
        """Return the rows with these numbers, in the given order: tokens and segments of shape [B, L]."""
        answers = [(places, self._ask(number, rows, _OpenShard.read)) for number, places, rows in self._by_shard(indices)]
        parts = [(places, part) for places, part in answers if part is not None]
        if len(answers) == len(parts) == 1:  # avoids a copy
            return parts[0][1]
        tokens_BL = np.zeros((len(indices), self.row_length), self._token_type)
        segments_BL = np.full(tokens_BL.shape, -1, np.int32)
        has_loss_BL = None if all(part.has_loss_BL is None for _, part in parts) else np.ones(tokens_BL.shape, np.bool_)
        for places, part in parts:
            tokens_BL[places], segments_BL[places] = part.tokens_BL, part.segments_BL
            if has_loss_BL is not None and part.has_loss_BL is not None:
                has_loss_BL[places] = part.has_loss_BL
        return RowBatch(tokens_BL, segments_BL, has_loss_BL)

    def num_targets(self, indices: Int64s) -> Int64s:
        """Return the number of targets in each of these rows, shape [B], without reading a token."""
        return self._count(indices, lambda shard, rows: shard.targets_R[rows])

    def num_sequences(self, indices: Int64s) -> Int64s:
        """Return the number of segments with at least one target in each of these rows, shape [B]."""
        return self._count(indices, lambda shard, rows: shard.sequences_R[rows])

    def _count(self, indices: Int64s, question: Callable[[_OpenShard, Int64s], Int64s]) -> Int64s:
        counts_B = np.zeros(len(indices), np.int64)
        for number, places, rows in self._by_shard(indices):
            if (counts := self._ask(number, rows, question)) is not None:
                counts_B[places] = counts
        return counts_B

    def source_ids(self, indices: Int64s) -> Int64s:
        """Return the source of each of these rows, as an index into the manifest's `sources`, shape [B], without reading a file."""
        self._check(indices)
        return self._source_of_shard[np.searchsorted(self._ends, indices, side="right")]

    def source_ranges(self) -> list[Int64s]:
        """Return the rows of each source in the manifest, as ascending ranges (first, end), shape [ranges, 2]."""
        ranges: list[list[list[int]]] = [[] for _ in self._manifest.sources]
        for source, end, entry in zip(self._source_of_shard, self._ends.tolist(), self._entries, strict=True):
            found, first = ranges[source], end - entry.rows
            if found and found[-1][1] == first:
                found[-1][1] = end
            elif entry.rows:
                found.append([first, end])
        return [np.array(found, np.int64).reshape(-1, 2) for found in ranges]

    def document_ids(self, index: int) -> NDArray[np.uint64]:
        [(number, _, rows)] = self._by_shard(np.array([index]))
        ids = self._ask(number, rows, lambda shard, rows: shard.document_ids(int(rows[0])))
        return np.empty(0, np.uint64) if ids is None else ids

    def _by_shard(self, indices: Int64s) -> list[tuple[int, Any, Int64s]]:
        """Return for each needed shard its number, the positions in the request that it fills, and the row numbers in the shard."""
        self._check(indices)
        shards_B = np.searchsorted(self._ends, indices, side="right")
        rows_B = indices - self._firsts[shards_B]
        numbers = sorted(set(shards_B.tolist()))  # for some ten rows faster than `np.unique`
        if len(numbers) == 1:
            return [(numbers[0], slice(None), rows_B)]
        chosen = [np.flatnonzero(shards_B == number) for number in numbers]
        return [(number, places, rows_B[places]) for number, places in zip(numbers, chosen, strict=True)]

    def _ask(self, number: int, rows: Int64s, question: Callable[[_OpenShard, Int64s], _AnswerT]) -> _AnswerT | None:
        """Return the answer of a shard to a question about some of its rows; None if these are padding, or after a noted error."""
        if number in self._blank:
            return None
        entry = self._entries[number]
        problem: ShardError | OSError
        try:
            shard = self._open.get(number)
            if shard is None:
                verify = self._verify or number in self._suspect
                shard = self._open[number] = _OpenShard(self._directory, entry, self._manifest, verify=verify)
            shard.check_unchanged()
            return question(shard, rows)
        except PreparedDataError as error:
            distrust(self._directory)
            problem = ShardError(entry.path, str(error))
        except OSError as error:
            error.filename = error.filename or str(self._directory / entry.path)
            problem = error
        # A stale handle of a network file system stays stale, so the next use opens the shard again.
        self._open.pop(number, None)
        self._suspect.add(number)
        if self._note is None:
            raise problem
        self._note(problem)
        return None

    def _check(self, indices: Int64s) -> None:
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} are requested, but there are {len(self)} rows")


class _OpenShard:
    def __init__(self, directory: Path, entry: ShardEntry, manifest: Manifest, *, verify: bool) -> None:
        path = directory / entry.path
        self._path = path
        self._vocab_size = manifest.vocab_size
        # A mapping stays valid when the file is replaced, so a new `prepare` does not disturb a running trainer.
        file = open_listed(directory, entry.path, entry.bytes, entry.sha256 if verify else None)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self._state = self._look()
        try:
            mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
            batch = _only_batch(pa.py_buffer(mapping), manifest)
            columns = {name: batch.column(name) for name in batch.schema.names}
            tokens = columns["tokens"].values.to_numpy(zero_copy_only=True)
            self._tokens_RL: Tokens = tokens.reshape(entry.rows, manifest.row_length)
            self._offsets = columns["segments"].offsets.to_numpy().astype(np.int64)
            self._lengths_S = columns["segments"].values.to_numpy(zero_copy_only=True)
            self._documents_S = columns["documents"].values.to_numpy(zero_copy_only=True)
            if not np.array_equal(self._offsets, columns["documents"].offsets.to_numpy()):
                raise ValueError("a row has different numbers of documents and segments")
            sizes_R = self._sum_by_row(self._lengths_S)
            if (longest := int(sizes_R.max(initial=0))) > manifest.row_length:
                raise ValueError(f"the segments of a row have {longest} tokens, more than the {manifest.row_length} of the row")
            self._mask = None
            if (runs := columns.get(LOSS_RUNS)) is not None:
                self._mask = LossMask.in_column(runs)
                self._mask.check(sizes_R)
        except (pa.ArrowException, ValueError) as error:
            raise PreparedDataError(f"{path}: this shard cannot be read ({error}); run `prepare` again") from None
        targets_S = _num_targets_of(self._lengths_S, np.diff(self._offsets), self._mask)
        self.targets_R = self._sum_by_row(targets_S)
        self.sequences_R = self._sum_by_row(targets_S > 0)
        self._run_ends_R = np.cumsum(self._mask.num_runs_B) if self._mask else np.empty(0, np.int64)

    def check_unchanged(self) -> None:
        if self._look() != self._state:
            raise PreparedDataError(
                f"{self._path}: this shard was changed while it was read ({self._look()[0]} bytes now, "
                f"{self._state[0]} before); stop the program that writes to it and run `prepare` again"
            )

    def read(self, rows: Int64s) -> RowBatch:
        """Shapes [B, L]. An id outside of the vocabulary would make a model read other memory, or end a process on a GPU."""
        tokens_BL = self._tokens_RL[rows]
        if tokens_BL.size and (largest := int(tokens_BL.max())) >= self._vocab_size:
            raise PreparedDataError(
                f"{self._path}: it contains token {largest}, but the ids of the vocabulary are 0 to "
                f"{self._vocab_size - 1}; the shard is invalid: run `prepare` again"
            )
        sizes_B = np.full(len(rows), tokens_BL.shape[1])
        segments = number_tokens(self._offsets[rows], self._offsets[rows + 1], self._lengths_S, sizes_B)
        has_loss_BL = None
        if self._mask is not None:
            ends_B = self._run_ends_R[rows]
            runs = number_tokens(ends_B - self._mask.num_runs_B[rows], ends_B, self._mask.runs_N, sizes_B)
            has_loss_BL = (runs & 1).astype(np.bool_).reshape(tokens_BL.shape)  # without a meaning for padding
        return RowBatch(tokens_BL, segments.reshape(tokens_BL.shape), has_loss_BL)

    def document_ids(self, row: int) -> NDArray[np.uint64]:
        ids: NDArray[np.uint64] = self._documents_S[self._offsets[row] : self._offsets[row + 1]]
        return ids

    def _sum_by_row(self, values_S: NDArray[Any]) -> Int64s:
        before = np.concatenate([[0], np.cumsum(values_S, dtype=np.int64)])
        sums: Int64s = before[self._offsets[1:]] - before[self._offsets[:-1]]
        return sums

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def _only_batch(content: pa.Buffer, manifest: Manifest) -> pa.RecordBatch:
    """Return the record batch of a shard, without a copy; ValueError if it is not as `write_shard` writes it."""
    schema, found_batches = open_arrow(content)
    has_mask = manifest.format == MASKED_FORMAT and LOSS_RUNS in schema.names
    columns = [
        ("tokens", pa.list_(pa.from_numpy_dtype(np.dtype(manifest.token_type)), manifest.row_length)),
        ("segments", pa.list_(pa.uint32())),
        ("documents", pa.list_(pa.uint64())),
    ]
    expected = pa.schema([*columns, (LOSS_RUNS, pa.list_(pa.uint32()))] if has_mask else columns)
    if not schema.equals(expected):
        found, wanted = (
            visible(", ".join(f"{field.name}: {field.type}" for field in one))[:_MAX_SHOWN] for one in (schema, expected)
        )
        raise ValueError(f"the columns are {found}, but {wanted} are expected")
    batches = list(islice(found_batches, 2))
    if len(batches) != 1:
        raise ValueError(f"it has {'several' if batches else 'no'} record batches, but one is expected")
    batches[0].validate(full=True)  # invalid offsets would crash this process
    if any(column.null_count for column in batches[0].columns):
        raise ValueError("a row is null")
    return batches[0]
