"""Decides which documents are dropped as duplicates, and which must be in the same split.

A document is dropped only if it is similar to an earlier document that is kept, its leader: in a chain where each resembles only
the next, not all are dropped for the first. Documents that pairs of any kind connect are one component, which is in one split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.dedup.keys import DIGEST_BYTES, choose_bands, fixed_bytes, read_digests, read_keys
from data_pipeline.dedup.pairs import (
    SAMPLE_EVERY,
    BucketResult,
    BucketTask,
    Pairs,
    RefineTask,
    Texts,
    VerifyResult,
    VerifyTask,
    copies_path,
    cut_evenly,
    find_candidates,
    read_pairs,
    refine_candidates,
    verify_candidates,
)
from data_pipeline.documents import Reason, document_id
from data_pipeline.execution.tasks import Counts, Runner, commit_result

FATES_SCHEMA = pa.schema(
    [("id", pa.uint64()), ("fate", pa.uint8()), ("split_key", pa.binary(DIGEST_BYTES)), ("leader", pa.uint64())]
)
"""In ascending order of the ids. `split_key` is equal for all documents that must be in the same split."""

STAGES = ("find duplicates", "verify duplicates", "resolve duplicates", "mark duplicates")

BUCKET_ENTRIES = 1 << 22  # entries of keys in one bucket: 64 MiB, and about five times as much while they are sorted
MAX_ROUNDS = 5  # of pairing the documents that are kept; two or three find all
TASK_PAIRS = 1 << 18  # candidates that one task verifies
ENTRY_BYTES, PAIR_BYTES, KEY_BYTES = 16, 16, 28  # size of each in its file, for the progress

_BATCH_ROWS = 1 << 16
_LARGEST = 20  # clusters in the report
_MEMBERS = 5  # ids of each cluster
_SAMPLE_BYTES = 400
_SAMPLE_CHARS = 100
_ALL_IDS = (0, (1 << 64) - 1)

Ids = NDArray[np.uint64]
Indices = NDArray[np.int64]


class Fate(IntEnum):
    KEEP = 0
    EXACT = 1
    NEAR = 2
    BENCHMARK = 3


_KEPT = "kept"
REASONS = {
    Fate.EXACT: Reason.EXACT_DUPLICATE,
    Fate.NEAR: Reason.NEAR_DUPLICATE,
    Fate.BENCHMARK: Reason.BENCHMARK_OVERLAP,
}

_NAMES = {Fate.KEEP: _KEPT, **{fate: reason.value for fate, reason in REASONS.items()}}


@dataclass(frozen=True)
class PartitionKeys:
    """Its texts are in `text/NNNNNN.arrow` and its keys in `keys/NNNNNN.arrow` of the work folder."""

    number: int
    source: str
    num_documents: int


@dataclass(frozen=True)
class MarkTask:
    number: int
    keys: Path
    resolved: Path
    settings: DedupConfig
    output: Path


@dataclass
class MarkResult:
    counts: Counts


@dataclass(frozen=True)
class Duplicates:
    rejected: list[Counts]  # documents by reason, for each partition
    sources: dict[str, Counts]  # documents by fate (`kept` or a reason), for each source
    candidates: int  # pairs that share a key and are not equal
    similar: int  # of these pairs, those whose similarity reaches the threshold
    capped: int  # documents that were kept because their leaders had absorbed `max_cluster` others
    clusters: list[dict[str, Any]]  # `leader` with `id`, `path` and `line`; `size`, `members` and `sample`
    alarms: list[str]  # sources that lose more than `alarm_fraction` of their documents as duplicates

    @property
    def num_kept(self) -> int:
        return sum(counts.get(_KEPT, 0) for counts in self.sources.values())

    @property
    def report(self) -> dict[str, Any]:
        return {
            **{fate.name.lower(): sum(counts[_NAMES[fate]] for counts in self.sources.values()) for fate in Fate if fate},
            "candidates": self.candidates,
            "similar": self.similar,
            "capped": self.capped,
            "clusters": self.clusters,
            "lost_share_by_source": {name: round(_lost_share(counts), 6) for name, counts in self.sources.items()},
            "alarms": self.alarms,
        }


def find_duplicates(
    run: Runner, partitions: Sequence[PartitionKeys], settings: DedupConfig, work: Path, bucket_entries: int = BUCKET_ENTRIES
) -> Duplicates:
    """Write `duplicates/NNNNNN.arrow` for every partition. The result does not depend on the engine or on how the tasks are cut."""
    folder = work / "duplicates"
    keys_per_document = int(settings.exact) + (choose_bands(settings).num_bands if settings.exact and settings.near else 0)
    num_entries = sum(partition.num_documents for partition in partitions) * keys_per_document
    numbers, num_buckets = tuple(partition.number for partition in partitions), -(-num_entries // bucket_entries)
    buckets = [
        BucketTask(bucket, num_buckets, numbers, work / "keys", folder / f"bucket-{bucket:06d}") for bucket in range(num_buckets)
    ]
    found = run(STAGES[0], find_candidates, buckets, _shares(ENTRY_BYTES * num_entries, len(buckets)), BucketResult)
    copies = tuple(copies_path(task.output) for task in buckets)
    crowded = {task.output: result.crowded for task, result in zip(buckets, found, strict=True) if result.crowded}
    candidates = [task.output for task in buckets]
    similar: list[Path] = []
    counts = VerifyResult()
    for number in range(MAX_ROUNDS):
        samples = (later for result in found for later in result.samples)
        ranges = cut_evenly(samples, TASK_PAIRS // SAMPLE_EVERY) if any(result.candidates for result in found) else []
        verify = [
            VerifyTask(*bounds, tuple(candidates), work / "text", settings, folder / f"verify-{number}-{place:06d}")
            for place, bounds in enumerate(ranges)
        ]
        sizes = _shares(PAIR_BYTES * sum(result.candidates for result in found), len(verify))
        verified = run(STAGES[1], verify_candidates, verify, sizes, VerifyResult)
        counts = VerifyResult(*(sum(getattr(each, name) for each in [counts, *verified]) for name in ("candidates", "similar")))
        similar += [task.output for task in verify]
        resolve = ResolveTask(copies, tuple(similar), work, settings, folder / f"resolved-{number}")
        [resolved] = run(STAGES[2], resolve_pairs, [resolve], [PAIR_BYTES * counts.similar], ResolveResult)
        if not crowded or number == MAX_ROUNDS - 1 or (number and not any(result.similar for result in verified)):
            break
        refine = [RefineTask(bucket, resolve.output, folder / f"{bucket.name}-{number}") for bucket in crowded]
        found = run(STAGES[0], refine_candidates, refine, [ENTRY_BYTES * size for size in crowded.values()], BucketResult)
        candidates = [task.output for task in refine]
    marks = [MarkTask(each.number, work / "keys", resolve.output, settings, folder / f"{each.number:06d}") for each in partitions]
    marked = run(STAGES[3], mark_partition, marks, [KEY_BYTES * each.num_documents for each in partitions], MarkResult)
    sources: dict[str, Counts] = defaultdict(lambda: dict.fromkeys(_NAMES.values(), 0))
    for partition, result in zip(partitions, marked, strict=True):
        for name, count in result.counts.items():
            sources[partition.source][name] += count
    return Duplicates(
        rejected=[{name: count for name, count in result.counts.items() if count and name != _KEPT} for result in marked],
        sources=dict(sources),
        candidates=counts.candidates,
        similar=counts.similar,
        capped=resolved.capped,
        clusters=resolved.largest,
        alarms=[name for name, fates in sources.items() if _lost_share(fates) > settings.alarm_fraction],
    )


def _shares(total: int, parts: int) -> list[int]:
    """Divide a size into about equal parts, because the true sizes are not known in advance."""
    return [total // max(parts, 1)] * parts


def mark_partition(task: MarkTask) -> MarkResult:
    """Write one row for each row of the text table, and count the documents by fate."""
    ids, digests, overlaps = read_keys(task.keys / f"{task.number:06d}")
    fates, leaders = np.full(len(ids), Fate.KEEP, np.uint8), ids.copy()
    fates[overlaps >= task.settings.benchmark_overlaps] = Fate.BENCHMARK
    split_keys = digests.copy()
    bounds = np.array([document_id(task.number, 0), document_id(task.number + 1, 0)], np.uint64)
    for whole in read_batches(task.resolved):
        begin, end = np.searchsorted(whole.column("id").to_numpy(), bounds).tolist()
        batch = whole.slice(begin, end - begin)
        rows = np.searchsorted(ids, batch.column("id").to_numpy())
        fates[rows], leaders[rows] = batch.column("fate").to_numpy(), batch.column("leader").to_numpy()
        split_keys[rows] = read_digests(batch.column("split_key"))
    with TableWriter(task.output, FATES_SCHEMA) as table:
        table.write(pa.record_batch([ids, fates, fixed_bytes(split_keys), leaders], schema=FATES_SCHEMA))
    counts = np.bincount(fates, minlength=len(Fate)).tolist()
    return commit_result(task, MarkResult({_NAMES[fate]: counts[fate] for fate in Fate}), table.written)


def _lost_share(counts: Counts) -> float:
    return (counts[_NAMES[Fate.EXACT]] + counts[_NAMES[Fate.NEAR]]) / max(sum(counts.values()), 1)


@dataclass(frozen=True)
class Resolution:
    """The decisions about the M documents that are in any pair, in ascending order of their ids."""

    ids_M: Ids
    fates_M: NDArray[np.uint8]
    leaders_M: Ids  # the document that is kept instead; the document itself if it is kept
    roots_M: Ids  # the first document of its component
    capped: int


@dataclass(frozen=True)
class ResolveTask:
    copies: tuple[Path, ...]
    similar: tuple[Path, ...]
    work: Path
    settings: DedupConfig
    output: Path


@dataclass
class ResolveResult:
    capped: int
    largest: list[dict[str, Any]]  # clusters, as in `Duplicates`


def resolve_pairs(task: ResolveTask) -> ResolveResult:
    """Write the decisions about documents in any pair, with about 150 bytes of memory for each pair and its documents."""
    resolution = resolve(read_pairs(task.copies, *_ALL_IDS), read_pairs(task.similar, *_ALL_IDS), task.settings.max_cluster)
    digests_M = np.empty(len(resolution.roots_M), f"V{DIGEST_BYTES}")
    numbers_M = resolution.roots_M >> np.uint64(32)
    for number in np.unique(numbers_M).tolist():
        rows = np.flatnonzero(numbers_M == number)
        ids, digests, _ = read_keys(task.work / "keys" / f"{number:06d}")
        digests_M[rows] = digests[np.searchsorted(ids, resolution.roots_M[rows])]
    columns = [resolution.ids_M, resolution.fates_M, fixed_bytes(digests_M), resolution.leaders_M]
    with TableWriter(task.output, FATES_SCHEMA) as table:
        for batch in pa.table(columns, schema=FATES_SCHEMA).to_batches(_BATCH_ROWS):
            table.write(batch)
    result = ResolveResult(resolution.capped, largest_clusters(resolution, Texts(task.work / "text")))
    return commit_result(task, result, table.written)


def resolve(copies: Pairs, similar: Pairs, max_cluster: int) -> Resolution:
    """Decide from pairs (later, earlier): the earlier of a copy is the first. A leader has at most `max_cluster` others."""
    ids_M = np.unique(np.concatenate([*copies, *similar]))
    copy, original = (np.searchsorted(ids_M, ids) for ids in copies)
    later, earlier = (np.searchsorted(ids_M, ids) for ids in similar)
    fates_M = np.zeros(len(ids_M), np.uint8)
    fates_M[copy] = Fate.EXACT
    leaders_M, capped = choose_leaders(fates_M == Fate.EXACT, later, earlier, max_cluster)
    fates_M[leaders_M != np.arange(len(ids_M))] = Fate.NEAR
    leaders_M[copy] = leaders_M[original]
    roots_M = components(len(ids_M), np.concatenate([copy, later]), np.concatenate([original, earlier]))
    return Resolution(ids_M, fates_M, ids_M[leaders_M], ids_M[roots_M], capped)


def choose_leaders(is_copy_M: NDArray[np.bool_], later: Indices, earlier: Indices, max_cluster: int) -> tuple[Indices, int]:
    """Return each document's leader, and how many are kept because none had room. The pairs are sorted by later, then earlier."""
    leaders = list(range(len(is_copy_M)))
    room = np.where(is_copy_M, -1, max_cluster).tolist()
    crowded: set[int] = set()
    for begin in range(0, len(later), _BATCH_ROWS):
        pairs = (nodes[begin : begin + _BATCH_ROWS].tolist() for nodes in (later, earlier))
        for document, other in zip(*pairs, strict=True):
            if room[document] < 0 or leaders[document] != document or room[other] < 0 or leaders[other] != other:
                continue  # already decided, or not a leader
            if room[other]:
                leaders[document] = other
                room[other] -= 1
            else:
                crowded.add(document)
    return np.array(leaders, np.int64), sum(leaders[document] == document for document in crowded)


def components(num_nodes: int, one: Indices, other: Indices) -> Indices:
    """Return the smallest node of each node's connected component, by hooking roots to smaller ones and halving the paths."""
    roots = np.arange(num_nodes)
    while True:
        of_one, of_other = roots[one], roots[other]
        is_open = of_one != of_other
        if not is_open.any():
            return roots
        one, other, of_one, of_other = one[is_open], other[is_open], of_one[is_open], of_other[is_open]
        np.minimum.at(roots, np.maximum(of_one, of_other), np.minimum(of_one, of_other))
        while not np.array_equal(roots, up := roots[roots]):
            roots = up


def largest_clusters(resolution: Resolution, texts: Texts) -> list[dict[str, Any]]:
    """Return the leaders with the most dropped documents, copies included. Clusters of equal size are in the order of the input."""
    dropped = np.flatnonzero(resolution.fates_M != Fate.KEEP)
    leaders, counts = np.unique(resolution.leaders_M[dropped], return_counts=True)
    order = np.lexsort((leaders, -counts))[:_LARGEST]
    return [
        {
            "leader": {"id": leader, **dict(zip(("path", "line"), texts.place(leader), strict=True))},
            "size": count + 1,
            "members": resolution.ids_M[dropped[resolution.leaders_M[dropped] == leader][:_MEMBERS]].tolist(),
            "sample": texts.find(leader)[:_SAMPLE_BYTES].to_pybytes().decode("utf-8", "ignore")[:_SAMPLE_CHARS],
        }
        for leader, count in zip(leaders[order].tolist(), counts[order].tolist(), strict=True)
    ]
