"""Finds pairs of similar documents: candidates that share a key, bucket by bucket, and then those whose words are compared.

A bucket is a range of keys that fits in memory. The number of workers does not change the buckets. If a million documents share a
key, each is paired with the first few of them and with the one before it, which is enough to drop most. The remaining ones are then
paired more densely.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.dedup.keys import entries_path, shingle
from data_pipeline.documents import document_id, partition_of
from data_pipeline.execution.tasks import commit_result
from data_pipeline.text import Hashes, TextBatch

PAIRS_SCHEMA = pa.schema([("later", pa.uint64()), ("earlier", pa.uint64())])  # document ids; each batch is in order of `later`
GROUPS_SCHEMA = pa.schema([("key", pa.uint64()), ("id", pa.uint64())])  # sorted by key, then id
SAMPLE_EVERY = 256  # one pair in so many gives a sample, by which the verification is cut into even tasks

_FIRST_MEMBERS = 4  # the first documents of a group, with which each other one is paired
_FIRST_SURVIVORS = 64  # the same, after most documents are dropped

Ids = NDArray[np.uint64]
Pairs = tuple[Ids, Ids]
_CHUNK_BYTES = 16 << 20  # of texts whose pairs are compared together; their shingles need up to eight times as much memory
_OPEN_FILES = 64
_BATCH_BYTES = 1 << 20  # of texts whose shingles are computed together


@dataclass(frozen=True)
class BucketTask:
    bucket: int
    num_buckets: int
    partitions: tuple[int, ...]
    keys: Path
    output: Path  # pairs that may be similar; those of equal documents are in `copies_path(output)`


@dataclass
class BucketResult:
    candidates: int = 0  # pairs, some counted more than once
    crowded: int = 0  # members of groups that were not paired completely
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RefineTask:
    bucket: Path
    resolved: Path  # decisions so far: `id`, ascending, and `fate`, 0 for documents that are kept
    output: Path


def find_candidates(task: BucketTask) -> BucketResult:
    keys, checks, ids = read_bucket(task)
    keys, checks, ids = only_shared(keys, checks, ids)
    copies, keys, ids = take_copies(keys, checks, ids)
    with TableWriter(copies_path(task.output), PAIRS_SCHEMA) as copied:
        copied.write(pa.record_batch(list(copies), schema=PAIRS_SCHEMA))
    is_crowded = group_sizes(keys) > _FIRST_MEMBERS + 2
    result = BucketResult(crowded=int(is_crowded.sum()))
    with TableWriter(crowded_path(task.output), GROUPS_SCHEMA) as crowded:
        crowded.write(pa.record_batch([keys[is_crowded], ids[is_crowded]], schema=GROUPS_SCHEMA))
    pairs = _write_pairs(task.output, pair_up(keys, ids, _FIRST_MEMBERS), result)
    return commit_result(task, result, copied.written, crowded.written, pairs.written)


def refine_candidates(task: RefineTask) -> BucketResult:
    [batch] = read_batches(crowded_path(task.bucket))
    keys, ids = batch.column("key").to_numpy(), batch.column("id").to_numpy()
    is_kept = ~are_dropped(ids, task.resolved)
    result = BucketResult()
    pairs = _write_pairs(task.output, pair_up(keys[is_kept], ids[is_kept], _FIRST_SURVIVORS), result)
    return commit_result(task, result, pairs.written)


def _write_pairs(output: Path, pairs: Iterable[Pairs], result: BucketResult) -> TableWriter:
    with TableWriter(output, PAIRS_SCHEMA) as table:
        for later, earlier in pairs:
            table.write(pa.record_batch([later, earlier], schema=PAIRS_SCHEMA))
            result.candidates += len(later)
            result.samples += later[SAMPLE_EVERY // 2 :: SAMPLE_EVERY].tolist()
    return table


def copies_path(output: Path) -> Path:
    return output.with_name(f"{output.name}-copies")


def crowded_path(output: Path) -> Path:
    return output.with_name(f"{output.name}-crowded")


def are_dropped(ids: Ids, resolved: Path) -> NDArray[np.bool_]:
    are = np.zeros(len(ids), np.bool_)
    order = np.argsort(ids)
    for batch in read_batches(resolved):
        known = batch.column("id").to_numpy()
        begin = np.searchsorted(ids, known[0], sorter=order)
        rows = order[begin : np.searchsorted(ids, known[-1], "right", sorter=order)]
        are[rows] = np.isin(ids[rows], known[batch.column("fate").to_numpy() != 0])
    return are


def read_bucket(task: BucketTask) -> tuple[Ids, NDArray[np.uint32], Ids]:
    """Return key, check and id of a bucket's entries. Entries of one run with equal keys are in the order of their ids."""
    first, last = ((bucket << 64) // task.num_buckets for bucket in (task.bucket, task.bucket + 1))
    keys, checks, ids = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)], [np.empty(0, np.uint64)]
    for number in task.partitions:
        for batch in read_batches(entries_path(task.keys / f"{number:06d}")):
            run = batch.column("key").to_numpy()
            begin = int(np.searchsorted(run, np.uint64(first)))
            end = int(np.searchsorted(run, np.uint64(last))) if last < 1 << 64 else len(run)
            keys.append(run[begin:end])
            checks.append(batch.column("check").to_numpy()[begin:end])
            ids.append(batch.column("ordinal").to_numpy()[begin:end].astype(np.uint64) | np.uint64(document_id(number, 0)))
    return np.concatenate(keys), np.concatenate(checks), np.concatenate(ids)


def only_shared(keys: Ids, checks: NDArray[np.uint32], ids: Ids) -> tuple[Ids, NDArray[np.uint32], Ids]:
    """Return the entries whose key another entry has too, sorted by key, then check, then id."""
    order = np.argsort(keys, kind="stable")
    is_same = np.diff(keys[order]) == 0
    order = order[np.append(is_same, False) | np.append(False, is_same)] if len(order) else order
    order = order[np.lexsort((ids[order], checks[order], keys[order]))]
    return keys[order], checks[order], ids[order]


def take_copies(keys: Ids, checks: NDArray[np.uint32], ids: Ids) -> tuple[Pairs, Ids, Ids]:
    """Of equal documents that share a band, only the first keeps its band entry. Entries are returned by key, then id."""
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = (keys[1:] != keys[:-1]) | (checks[1:] != checks[:-1])
    first_of = ids[np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))]
    is_digest = (keys & np.uint64(1)).astype(np.bool_)
    copies = np.flatnonzero(is_digest & ~is_first)
    copies = copies[np.argsort(ids[copies])]
    bands = np.flatnonzero(~is_digest & is_first)
    bands = bands[np.lexsort((ids[bands], keys[bands]))]
    return (ids[copies], first_of[copies]), keys[bands], ids[bands]


def pair_up(keys: Ids, ids: Ids, num_first: int) -> Iterator[Pairs]:
    """Pair with the first `num_first` members of a group and the one before; the entries are sorted by key, then id."""
    sizes = group_sizes(keys)
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    first = np.repeat(starts, sizes[starts])
    place = np.arange(len(keys)) - first
    for member in range(num_first):
        rows = np.flatnonzero(place > member)
        yield distinct(ids[rows], ids[first[rows] + member])
    rows = np.flatnonzero(place > num_first)
    yield distinct(ids[rows], ids[rows - 1])


def group_sizes(keys: Ids) -> NDArray[np.int64]:
    """Return for each entry the number of entries with its key; equal keys must be adjacent."""
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    counts = np.diff(np.append(starts, len(keys)))
    return np.repeat(counts, counts)


def distinct(later: Ids, earlier: Ids) -> Pairs:
    """Return each pair once, sorted by the later document, then the earlier."""
    order = np.lexsort((earlier, later))
    later, earlier = later[order], earlier[order]
    is_new = np.ones(len(later), np.bool_)
    is_new[1:] = (later[1:] != later[:-1]) | (earlier[1:] != earlier[:-1])
    return later[is_new], earlier[is_new]


def read_pairs(outputs: Iterable[Path], lower: int, upper: int) -> Pairs:
    later, earlier = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for output in outputs:
        for batch in read_batches(output):
            ids = batch.column("later").to_numpy()
            begin, end = (int(np.searchsorted(ids, np.uint64(bound))) for bound in (lower, upper))
            later.append(ids[begin:end])
            earlier.append(batch.column("earlier").to_numpy()[begin:end])
    return distinct(np.concatenate(later), np.concatenate(earlier))


@dataclass(frozen=True)
class VerifyTask:
    """Compare the candidates whose later document has an id in [lower, upper)."""

    lower: int
    upper: int
    candidates: tuple[Path, ...]
    texts: Path
    settings: DedupConfig
    output: Path


@dataclass
class VerifyResult:
    candidates: int = 0
    similar: int = 0


def verify_candidates(task: VerifyTask) -> VerifyResult:
    pairs = read_pairs(task.candidates, task.lower, task.upper)
    texts = Texts(task.texts)
    shingles: dict[int, Hashes] = {}
    similarities: list[float] = []
    for chunk in _chunks(pairs, texts):
        wanted = {identity for pair in chunk for identity in pair}
        shingles = {identity: shingles[identity] for identity in wanted & shingles.keys()}
        shingles |= shingles_of(wanted - shingles.keys(), texts, task.settings.shingle_words)
        similarities += [jaccard(shingles[later], shingles[earlier]) for later, earlier in chunk]
    later, earlier = (ids[np.array(similarities) >= task.settings.threshold] for ids in pairs)
    with TableWriter(task.output, PAIRS_SCHEMA) as table:
        table.write(pa.record_batch([later, earlier], schema=PAIRS_SCHEMA))
    return commit_result(task, VerifyResult(candidates=len(pairs[0]), similar=len(later)), table.written)


def cut_evenly(samples: Iterable[int], samples_per_task: int) -> list[tuple[int, int]]:
    """Return ranges that cover all ids, each with about `samples_per_task` samples."""
    ordered = sorted(samples)
    borders = sorted(set(ordered[samples_per_task::samples_per_task]) - {0})
    return list(zip([0, *borders], [*borders, (1 << 64) - 1], strict=True))


def _chunks(pairs: Pairs, texts: Texts) -> Iterator[list[tuple[int, int]]]:
    chunk: list[tuple[int, int]] = []
    members: set[int] = set()
    num_bytes = 0
    for pair in zip(*(ids.tolist() for ids in pairs), strict=True):
        new_bytes = sum(texts.find(identity).size for identity in pair if identity not in members)
        if chunk and num_bytes + new_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, members, num_bytes = [], set(), 0
            new_bytes = sum(texts.find(identity).size for identity in pair)
        chunk.append(pair)
        members.update(pair)
        num_bytes += new_bytes
    if chunk:
        yield chunk


class Texts:
    """Memory use is bounded, because the operating system can drop mapped pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, tuple[list[int], list[pa.RecordBatch]]] = {}

    def place(self, identity: int) -> tuple[str, int]:
        batch, row = self._row(identity)
        return batch.column("path")[row].as_py(), batch.column("line")[row].as_py()

    def find(self, identity: int) -> pa.Buffer:
        batch, row = self._row(identity)
        return batch.column("text")[row].as_buffer()

    def _row(self, identity: int) -> tuple[pa.RecordBatch, int]:
        number = partition_of(identity)
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            batches = [batch for batch in read_batches(self._folder / f"{number:06d}") if batch.num_rows]
            self._open[number] = [batch.column("id")[0].as_py() for batch in batches], batches
        first_ids, batches = self._open[number]
        place = bisect_right(first_ids, identity) - 1
        if place >= 0:
            ids = batches[place].column("id").to_numpy()
            row = int(np.searchsorted(ids, np.uint64(identity)))
            if row < len(ids) and ids[row] == identity:
                return batches[place], row
        raise KeyError(f"{self._folder}: no document with id {identity}")


def shingles_of(ids: set[int], texts: Texts, num_words: int) -> dict[int, Hashes]:
    found: dict[int, Hashes] = {}
    ordered = sorted(ids)
    ends = np.cumsum([texts.find(identity).size for identity in ordered]) // _BATCH_BYTES
    for _, batch in groupby(zip(ends.tolist(), ordered, strict=True), key=itemgetter(0)):
        members = [identity for _, identity in batch]
        shingles = shingle(TextBatch([texts.find(identity).to_pybytes() for identity in members]), num_words)
        found |= {identity: shingles.of(place) for place, identity in enumerate(members)}
    return found


def jaccard(one: Hashes, other: Hashes) -> float:
    """Return the share of common members of two sets, given in ascending order; 0 for two empty sets."""
    merged = np.concatenate([one, other])
    merged.sort()
    common = int(np.count_nonzero(merged[1:] == merged[:-1]))
    return common / max(len(merged) - common, 1)
