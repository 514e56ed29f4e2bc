"""Finds validation text and benchmark text in the training text of prepared data, decoded from its tokens, for `leaks`.

Memory grows with the validation text, by about twice its size for documents of 2 KB. Training text is streamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.stored_documents import PublishedDocument
from data_pipeline.dedup.benchmarks import load_benchmarks
from data_pipeline.dedup.keys import Keys, Shingles, shingle, sign
from data_pipeline.dedup.similarity import jaccard
from data_pipeline.text import TextBatch

_BATCH_CHARS = 1 << 20
_MAX_EXAMPLES = 10
_SAMPLE_CHARS = 100

Hashes = NDArray[np.uint64]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Example:
    place: int  # id of the validation document, or number of the benchmark item, from 1
    train: int
    similarity: float  # Jaccard similarity of the two documents; 0 if they only share a run of words
    sample: str


@dataclass(frozen=True)
class BenchmarkLeaks:
    path: str
    items: int
    overlapping: int  # items that share a run of `benchmark_words` words with a training document
    examples: list[Example]
    share: float


@dataclass(frozen=True)
class LeakReport:
    train: int
    val: int
    exact: int  # validation documents that equal a training document except for white space
    near: int  # others whose similarity to a training document reaches the threshold
    threshold: float
    examples: list[Example]
    benchmarks: list[BenchmarkLeaks]

    @property
    def leaked(self) -> bool:
        return bool(self.exact or self.near)

    @property
    def contaminated(self) -> bool:
        return any(benchmark.overlapping for benchmark in self.benchmarks)

    def summary(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        lines = [
            f"{self.val:,} validation documents compared with {self.train:,} training documents",
            f"exact duplicates in training  {self.exact:,}",
            f"near-duplicates in training   {self.near:,} (similarity of at least {self.threshold})",
            *_lines(self.examples, "validation document"),
        ]
        for benchmark in self.benchmarks:
            found = f"{benchmark.overlapping:,} of {benchmark.items:,} items overlap with training"
            lines.append(f"{benchmark.path}: {found} ({benchmark.share:.2%})")
            lines += _lines(benchmark.examples, "item")
        return "\n".join(lines)


def _lines(examples: Iterable[Example], what: str) -> Iterator[str]:
    for example in examples:
        similarity = f" ({example.similarity:.3f})" if example.similarity else ""
        yield f"  {what} {example.place}, training document {example.train}{similarity}: {' '.join(example.sample.split())!r}"


def check_leaks(
    train: Iterable[PublishedDocument], val: Iterable[PublishedDocument], settings: DedupConfig, benchmarks: Sequence[Path] = ()
) -> LeakReport:
    held_out = _HeldOut(val, settings.model_copy(update={"exact": True, "near": True}))
    indices = [load_benchmarks((path,), settings.benchmark_words) for path in benchmarks]
    hits: list[dict[int, Example]] = [{} for _ in benchmarks]
    num_train = 0
    for documents, batch in _batches(train):
        num_train += len(documents)
        held_out.compare(documents, batch)
        for index, found in zip(indices, hits, strict=True):
            overlaps = index.overlaps(batch)
            for place, item in zip(overlaps.documents.tolist(), overlaps.items.tolist(), strict=True):
                found.setdefault(item, _example(item + 1, documents[place], 0.0))
    return LeakReport(
        train=num_train,
        val=len(held_out.ids),
        exact=len(held_out.equal),
        near=len(held_out.similar.keys() - held_out.equal.keys()),
        threshold=settings.threshold,
        examples=_first(held_out.similar | held_out.equal),
        benchmarks=[
            BenchmarkLeaks(str(path), index.num_items, len(found), _first(found), round(len(found) / max(index.num_items, 1), 6))
            for path, index, found in zip(benchmarks, indices, hits, strict=True)
        ],
    )


class _HeldOut:
    def __init__(self, documents: Iterable[PublishedDocument], settings: DedupConfig) -> None:
        self._settings = settings
        self.ids: list[int] = []
        self.equal: dict[int, Example] = {}  # by the place of the validation document
        self.similar: dict[int, Example] = {}
        self._shingles: list[Hashes] = []
        self._of_digest: dict[bytes, list[int]] = {}
        keys: list[Hashes] = []
        owners: list[Int64s] = []
        for members, batch in _batches(documents):
            signed, shingles = self._sign(batch)
            places = np.arange(len(self.ids), len(self.ids) + len(members))
            for place, digest in zip(places.tolist(), signed.digests_D.tolist(), strict=True):
                self._of_digest.setdefault(digest, []).append(place)
            self._shingles += map(shingles.of, range(len(members)))
            keys.append(signed.bands_DB[signed.has_words_D].ravel())
            owners.append(np.repeat(places[signed.has_words_D], signed.bands_DB.shape[1]))
            self.ids += [document.id for document in members]
        unsorted = np.concatenate([*keys, np.empty(0, np.uint64)])
        order = np.argsort(unsorted, kind="stable")
        self._keys = unsorted[order]
        self._owners = np.concatenate([*owners, np.empty(0, np.int64)])[order]

    def _sign(self, batch: TextBatch) -> tuple[Keys, Shingles]:
        # Digests of code are the strictest: documents with equal ones are exact duplicates in every preparation.
        return sign(batch, range(len(batch)), ["code"] * len(batch), self._settings), shingle(batch, self._settings.shingle_words)

    def compare(self, documents: Sequence[PublishedDocument], batch: TextBatch) -> None:
        signed, shingles = self._sign(batch)
        for document, digest in zip(documents, signed.digests_D.tolist(), strict=True):
            for place in self._of_digest.get(digest, ()):
                self.equal.setdefault(place, _example(self.ids[place], document, 1.0))
        for number, place in self._candidates(signed):
            if place not in self.equal and place not in self.similar:
                similarity = jaccard(self._shingles[place], shingles.of(number))
                if similarity >= self._settings.threshold:
                    self.similar[place] = _example(self.ids[place], documents[number], similarity)

    def _candidates(self, signed: Keys) -> list[tuple[int, int]]:
        numbers = np.repeat(np.flatnonzero(signed.has_words_D), signed.bands_DB.shape[1])
        keys = signed.bands_DB[signed.has_words_D].ravel()
        first = np.searchsorted(self._keys, keys)
        counts = np.searchsorted(self._keys, keys, "right") - first
        step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = self._owners[np.repeat(first, counts) + step]
        return sorted(set(zip(np.repeat(numbers, counts).tolist(), owners.tolist(), strict=True)))


def _example(place: int, document: PublishedDocument, similarity: float) -> Example:
    return Example(place, document.id, similarity, document.text[:_SAMPLE_CHARS])


def _first(found: dict[int, Example]) -> list[Example]:
    return [found[place] for place in sorted(found)[:_MAX_EXAMPLES]]


def _batches(documents: Iterable[PublishedDocument]) -> Iterator[tuple[list[PublishedDocument], TextBatch]]:
    batch: list[PublishedDocument] = []
    num_chars = 0
    for document in chain(documents, [None]):
        if document is not None:
            batch.append(document)
            num_chars += len(document.text)
        if batch and (num_chars >= _BATCH_CHARS or document is None):
            yield batch, TextBatch([one.text.encode() for one in batch])
            batch, num_chars = [], 0
