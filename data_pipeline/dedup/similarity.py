from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.dedup.candidates import PAIRS_SCHEMA, Pairs, read_pairs
from data_pipeline.dedup.keys import shingle
from data_pipeline.documents import partition_of
from data_pipeline.execution.tasks import commit_result
from data_pipeline.text.batch import TextBatch

_CACHE_BYTES = 64 << 20  # of cached shingles
_CHUNK_BYTES = 16 << 20  # of texts whose pairs are compared together; their shingles need up to eight times as much memory
_OPEN_FILES = 64
_BATCH_BYTES = 1 << 20  # of texts whose shingles are computed together

Hashes = NDArray[np.uint64]


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
    cache = ShingleCache(texts, task.settings.shingle_words)
    similarities: list[float] = []
    for chunk in _chunks(pairs, texts):
        cache.load({identity for pair in chunk for identity in pair})
        similarities += [jaccard(cache[later], cache[earlier]) for later, earlier in chunk]
    later, earlier = (ids[np.array(similarities) >= task.settings.threshold] for ids in pairs)
    with TableWriter(task.output, PAIRS_SCHEMA) as table:
        table.write(pa.record_batch([later, earlier], schema=PAIRS_SCHEMA))
    return commit_result(task, VerifyResult(candidates=len(pairs[0]), similar=len(later)), table)


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


class ShingleCache:
    """The shingle sets of documents. Those that were not used recently are dropped and computed again on demand."""

    def __init__(self, texts: Texts, num_words: int) -> None:
        self._texts = texts
        self._num_words = num_words
        self._sets: dict[int, Hashes] = {}
        self._bytes = 0

    def __getitem__(self, identity: int) -> Hashes:
        return self._sets[identity]

    def load(self, ids: set[int]) -> None:
        """Load the sets of these documents. They stay available until the next call."""
        for identity in [*self._sets]:
            if self._bytes <= _CACHE_BYTES:
                break
            if identity not in ids:
                self._bytes -= self._sets.pop(identity).nbytes
        for identity in sorted(ids & self._sets.keys()):
            self._sets[identity] = self._sets.pop(identity)  # move to the end: most recently used
        missing = sorted(ids - self._sets.keys())
        ends = np.cumsum([self._texts.find(identity).size for identity in missing]) // _BATCH_BYTES
        for _, batch in groupby(zip(ends.tolist(), missing, strict=True), key=itemgetter(0)):
            members = [identity for _, identity in batch]
            shingles = shingle(TextBatch([self._texts.find(identity).to_pybytes() for identity in members]), self._num_words)
            for place, identity in enumerate(members):
                self._sets[identity] = shingles.of(place)
                self._bytes += self._sets[identity].nbytes


def jaccard(one: Hashes, other: Hashes) -> float:
    """Return the share of common members of two sets, given in ascending order; 0 for two empty sets."""
    merged = np.concatenate([one, other])
    merged.sort()
    common = int(np.count_nonzero(merged[1:] == merged[:-1]))
    return common / max(len(merged) - common, 1)
