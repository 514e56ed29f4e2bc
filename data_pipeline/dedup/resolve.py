"""Which documents go, and which must stay on one side of training and validation, decided from the pairs that were found.

Documents are taken in the order of the input. One is dropped only if it is similar to an earlier document that is kept, its leader:
so every document that is dropped has a near-duplicate that stays, and a chain in which each resembles only the next cannot be
dropped for the sake of its first. What hangs together by pairs of any kind, kept or not, is one component: all of it goes to one
side.
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

from data_pipeline.config import DedupSettings
from data_pipeline.dataset.tables import TableWriter
from data_pipeline.dedup.candidates import Pairs, read_pairs
from data_pipeline.dedup.keys import fixed_bytes, read_keys
from data_pipeline.dedup.signatures import DIGEST_BYTES
from data_pipeline.dedup.text_lookup import Texts
from data_pipeline.execution.tasks import commit_result

__all__ = ["RESOLVED_SCHEMA", "Fate", "Resolution", "ResolveResult", "ResolveTask", "components", "resolve", "resolve_pairs"]

RESOLVED_SCHEMA = pa.schema(
    [("id", pa.uint64()), ("fate", pa.uint8()), ("leader", pa.uint64()), ("split_key", pa.binary(DIGEST_BYTES))]
)
"""The documents that are similar to any other, in ascending order."""

_BATCH_ROWS = 1 << 16
_LARGEST = 20  # clusters that the report shows
_MEMBERS = 5  # of each of them
_SAMPLE_BYTES = 400
_SAMPLE_CHARS = 100
_ALL_IDS = (0, (1 << 64) - 1)

Ids = NDArray[np.uint64]
Indices = NDArray[np.int64]


class Fate(IntEnum):
    """What becomes of a document."""

    KEEP = 0
    EXACT = 1
    """Its letters are those of an earlier one."""
    NEAR = 2
    """It is similar to an earlier one."""
    BENCHMARK = 3
    """It shares text with a benchmark."""


@dataclass(frozen=True)
class Resolution:
    """What becomes of M documents, those that stand in any pair, in ascending order of their ids."""

    ids_M: Ids
    fates_M: NDArray[np.uint8]
    leaders_M: Ids
    """The document that stays in its place; itself where it is kept."""
    roots_M: Ids
    """The first document of its component."""
    capped: int
    """Documents that were kept because their leaders had absorbed as many as they may."""


@dataclass(frozen=True)
class ResolveTask:
    """Decide from all pairs."""

    copies: tuple[Path, ...]
    similar: tuple[Path, ...]
    work: Path
    """Folder of the folders `text` and `keys`."""
    settings: DedupSettings
    output: Path


@dataclass
class ResolveResult:
    """Counts, and the largest clusters."""

    capped: int
    clusters: list[dict[str, Any]] = field(default_factory=list)
    """`leader`, `size` with the leader, `members` (the first ids) and `sample`, the beginning of the leader's text."""


def resolve_pairs(task: ResolveTask) -> ResolveResult:
    """Writes what becomes of every document that is similar to another.

    Memory: about 150 bytes for each document in a pair and for each pair.
    """
    resolution = resolve(read_pairs(task.copies, *_ALL_IDS), read_pairs(task.similar, *_ALL_IDS), task.settings.max_cluster)
    split_keys = fixed_bytes(digests_of(resolution.roots_M, task.work / "keys"))
    columns = [*map(pa.array, (resolution.ids_M, resolution.fates_M, resolution.leaders_M)), split_keys]
    with TableWriter(task.output, RESOLVED_SCHEMA) as table:
        for begin in range(0, len(resolution.ids_M), _BATCH_ROWS):
            table.write(pa.record_batch([column[begin : begin + _BATCH_ROWS] for column in columns], schema=RESOLVED_SCHEMA))
    result = ResolveResult(resolution.capped, largest_clusters(resolution, Texts(task.work / "text")))
    return commit_result(task, result, table)


def resolve(copies: Pairs, similar: Pairs, max_cluster: int) -> Resolution:
    """Decides from pairs (later, earlier) of document ids: `copies` are equal and name the first of their kind, `similar` are near.

    A leader absorbs at most `max_cluster` near-duplicates; copies are not counted.
    """
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
    """The leader of each document, itself where it stays or is a copy; and how many stay because no leader had room.

    The pairs are in ascending order of the later document, then the earlier; the first leader with room is taken.
    """
    leaders = list(range(len(is_copy_M)))
    room = np.where(is_copy_M, -1, max_cluster).tolist()
    crowded: set[int] = set()
    for begin in range(0, len(later), _BATCH_ROWS):
        pairs = (nodes[begin : begin + _BATCH_ROWS].tolist() for nodes in (later, earlier))
        for document, other in zip(*pairs, strict=True):
            if room[document] < 0 or leaders[document] != document or room[other] < 0 or leaders[other] != other:
                continue  # decided, or of no help
            if room[other]:
                leaders[document] = other
                room[other] -= 1
            else:
                crowded.add(document)
    return np.array(leaders, np.int64), sum(leaders[document] == document for document in crowded)


def components(num_nodes: int, one: Indices, other: Indices) -> Indices:
    """The smallest node of each node's connected component, by hooking roots to smaller ones and halving the paths to them."""
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


def digests_of(ids: Ids, keys: Path) -> NDArray[np.void]:
    """The digests of documents of any partitions."""
    digests = np.empty(len(ids), f"V{DIGEST_BYTES}")
    numbers = ids >> np.uint64(32)
    for number in np.unique(numbers).tolist():
        rows = np.flatnonzero(numbers == number)
        known, of_known, _ = read_keys(keys / f"{number:06d}")
        digests[rows] = of_known[np.searchsorted(known, ids[rows])]
    return digests


def largest_clusters(resolution: Resolution, texts: Texts) -> list[dict[str, Any]]:
    """The leaders in whose favour most documents are dropped, copies included; equals in the order of the input."""
    dropped = np.flatnonzero(resolution.fates_M != Fate.KEEP)
    leaders, counts = np.unique(resolution.leaders_M[dropped], return_counts=True)
    order = np.lexsort((leaders, -counts))[:_LARGEST]
    return [
        {
            "leader": leader,
            "size": count + 1,
            "members": resolution.ids_M[dropped[resolution.leaders_M[dropped] == leader][:_MEMBERS]].tolist(),
            "sample": texts.read(leader)[:_SAMPLE_BYTES].decode("utf-8", "ignore")[:_SAMPLE_CHARS],
        }
        for leader, count in zip(leaders[order].tolist(), counts[order].tolist(), strict=True)
    ]
