"""Decides from the pairs which documents are dropped, and which must be in the same split.

A document is dropped only if it is similar to an earlier document that is kept, its leader: in a chain where each resembles only
the next, not all are dropped for the first. Documents that pairs of any kind connect are one component, which is in one split.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter
from data_pipeline.dedup.candidates import Pairs, read_pairs
from data_pipeline.dedup.keys import DIGEST_BYTES, fixed_bytes, read_keys
from data_pipeline.dedup.similarity import Texts
from data_pipeline.execution.tasks import commit_result

RESOLVED_SCHEMA = pa.schema(
    [("id", pa.uint64()), ("fate", pa.uint8()), ("leader", pa.uint64()), ("split_key", pa.binary(DIGEST_BYTES))]
)
"""The documents that are similar to any other, in ascending order of their ids."""

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
    clusters: list[dict[str, Any]] = field(default_factory=list)  # `leader` with `path` and `line`, `size`, `members`, `sample`


def resolve_pairs(task: ResolveTask) -> ResolveResult:
    """Write all decisions, with about 150 bytes of memory for each pair and its documents."""
    resolution = resolve(read_pairs(task.copies, *_ALL_IDS), read_pairs(task.similar, *_ALL_IDS), task.settings.max_cluster)
    digests_M = np.empty(len(resolution.roots_M), f"V{DIGEST_BYTES}")
    numbers_M = resolution.roots_M >> np.uint64(32)
    for number in np.unique(numbers_M).tolist():
        rows = np.flatnonzero(numbers_M == number)
        ids, digests, _ = read_keys(task.work / "keys" / f"{number:06d}")
        digests_M[rows] = digests[np.searchsorted(ids, resolution.roots_M[rows])]
    split_keys = fixed_bytes(digests_M)
    columns = [*map(pa.array, (resolution.ids_M, resolution.fates_M, resolution.leaders_M)), split_keys]
    with TableWriter(task.output, RESOLVED_SCHEMA) as table:
        for begin in range(0, len(resolution.ids_M), _BATCH_ROWS):
            table.write(pa.record_batch([column[begin : begin + _BATCH_ROWS] for column in columns], schema=RESOLVED_SCHEMA))
    result = ResolveResult(resolution.capped, largest_clusters(resolution, Texts(task.work / "text")))
    return commit_result(task, result, table)


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
            "leader": leader,
            **dict(zip(("path", "line"), texts.place(leader), strict=True)),
            "size": count + 1,
            "members": resolution.ids_M[dropped[resolution.leaders_M[dropped] == leader][:_MEMBERS]].tolist(),
            "sample": texts.find(leader)[:_SAMPLE_BYTES].to_pybytes().decode("utf-8", "ignore")[:_SAMPLE_CHARS],
        }
        for leader, count in zip(leaders[order].tolist(), counts[order].tolist(), strict=True)
    ]
