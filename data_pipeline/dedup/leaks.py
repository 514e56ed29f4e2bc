"""Finds validation text and benchmark text in the training text of prepared data, decoded from its tokens, for `leaks`.

Memory grows with the validation text, by about twice its size for documents of 2 KB. Training text is streamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.stored_documents import PublishedDocument
from data_pipeline.dedup.benchmarks import all_matches, load_benchmarks
from data_pipeline.dedup.keys import Shingles, shingle, sign
from data_pipeline.dedup.pairs import jaccard
from data_pipeline.text import Hashes, Int64s, TextBatch

_BATCH_CHARS = 1 << 20
_MAX_EXAMPLES = 10
_SAMPLE_CHARS = 100


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

    def describe(self) -> str:
        near = f"near-duplicates in training   {self.near:,} (similarity of at least {self.threshold})"
        sections = [("validation document", near, self.examples)]
        for one in self.benchmarks:
            head = f"{one.path}: {one.overlapping:,} of {one.items:,} items overlap with training ({one.share:.2%})"
            sections.append(("item", head, one.examples))
        lines = [
            f"{self.val:,} validation documents compared with {self.train:,} training documents",
            f"exact duplicates in training  {self.exact:,}",
        ]
        for what, head, examples in sections:
            lines.append(head)
            for example in examples:
                similarity = f" ({example.similarity:.3f})" if example.similarity else ""
                sample = " ".join(example.sample.split())
                lines.append(f"  {what} {example.place}, training document {example.train}{similarity}: {sample!r}")
        return "\n".join(lines)


def check_leaks(
    train: Iterable[PublishedDocument], val: Iterable[PublishedDocument], settings: DedupConfig, benchmarks: Sequence[Path] = ()
) -> LeakReport:
    settings = settings.model_copy(update={"exact": True, "near": True})
    ids: list[int] = []  # of the validation documents
    shingles: list[Hashes] = []
    of_digest: dict[bytes, list[int]] = {}
    band_keys, band_places = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for batch in _batches(val, settings):
        for place, digest in enumerate(batch.digests, len(ids)):
            of_digest.setdefault(digest, []).append(place)
        shingles += map(batch.shingles.of, range(len(batch.documents)))
        band_keys.append(batch.bands)
        band_places.append(batch.owners + len(ids))
        ids += [document.id for document in batch.documents]
    order = np.argsort(np.concatenate(band_keys), kind="stable")
    known_keys, known_places = np.concatenate(band_keys)[order], np.concatenate(band_places)[order]

    equal: dict[int, Example] = {}  # by the place of the validation document
    similar: dict[int, Example] = {}
    indices = [load_benchmarks((path,), settings.benchmark_words) for path in benchmarks]
    hits: list[dict[int, Example]] = [{} for _ in benchmarks]
    num_train = 0
    for batch in _batches(train, settings):
        num_train += len(batch.documents)
        for document, digest in zip(batch.documents, batch.digests, strict=True):
            for place in of_digest.get(digest, ()):
                equal.setdefault(place, _example(ids[place], document, 1.0))
        found, matches = all_matches(batch.bands, known_keys)
        pairs = set(zip(batch.owners[found].tolist(), known_places[matches].tolist(), strict=True))
        for number, place in sorted(pairs):
            if place not in equal and place not in similar:
                similarity = jaccard(shingles[place], batch.shingles.of(number))
                if similarity >= settings.threshold:
                    similar[place] = _example(ids[place], batch.documents[number], similarity)
        for index, of_items in zip(indices, hits, strict=True):
            for number, item in index.overlaps(batch.texts):
                of_items.setdefault(item, _example(item + 1, batch.documents[number], 0.0))
    return LeakReport(
        train=num_train,
        val=len(ids),
        exact=len(equal),
        near=len(similar.keys() - equal.keys()),
        threshold=settings.threshold,
        examples=_first(similar | equal),
        benchmarks=[
            BenchmarkLeaks(str(path), index.num_items, len(items), _first(items), round(len(items) / max(index.num_items, 1), 6))
            for path, index, items in zip(benchmarks, indices, hits, strict=True)
        ],
    )


def _example(place: int, document: PublishedDocument, similarity: float) -> Example:
    return Example(place, document.id, similarity, document.text[:_SAMPLE_CHARS])


def _first(found: dict[int, Example]) -> list[Example]:
    return [found[place] for place in sorted(found)[:_MAX_EXAMPLES]]


@dataclass(frozen=True)
class _Batch:
    documents: list[PublishedDocument]
    texts: TextBatch
    digests: list[bytes]
    shingles: Shingles
    bands: Hashes  # of all documents, one after the other
    owners: Int64s  # the document of each band


def _batches(documents: Iterable[PublishedDocument], settings: DedupConfig) -> Iterator[_Batch]:
    members: list[PublishedDocument] = []
    num_chars = 0
    for document in chain(documents, [None]):
        if document is not None:
            members.append(document)
            num_chars += len(document.text)
        if members and (num_chars >= _BATCH_CHARS or document is None):
            texts = TextBatch([member.text.encode() for member in members])
            # Digests of code are the strictest: documents with equal ones are exact duplicates in every preparation.
            keys = sign(texts, range(len(texts)), settings)
            owners = np.repeat(np.flatnonzero(keys.has_words_D), keys.bands_DB.shape[1])
            bands = keys.bands_DB[keys.has_words_D].ravel()
            yield _Batch(members, texts, keys.digests_D.tolist(), shingle(texts, settings.shingle_words), bands, owners)
            members, num_chars = [], 0
