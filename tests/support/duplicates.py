"""Documents and keys in the form that the read stage writes, corpora with planted near-duplicates, and exact reference results."""

from __future__ import annotations

import random
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.dedup.benchmarks import load_benchmarks
from data_pipeline.dedup.duplicates import Duplicates, PartitionKeys, find_duplicates
from data_pipeline.dedup.keys import KeyWriter, sign
from data_pipeline.dedup.pairs import read_pairs
from data_pipeline.documents import document_id
from data_pipeline.sources.inputs import code_files, standard_library
from data_pipeline.text import TextBatch

_TEXT_SCHEMA = pa.schema([("id", pa.uint64()), ("path", pa.string()), ("line", pa.uint32()), ("text", pa.large_string())])
_ROWS = 100  # documents per record batch
_ALL_IDS = (0, (1 << 64) - 1)

Pair = tuple[int, int]


@dataclass(frozen=True)
class Fates:
    """The decision of the stage about each document, by the index of the document in the corpus."""

    fates: list[int]
    leaders: list[int]
    split_keys: list[bytes]


def run_inline(_name: str, function: Callable[[Any], Any], tasks: list[Any], sizes: Sequence[int], _kind: object) -> list[Any]:
    """Run the tasks of a stage one after the other."""
    assert len(tasks) == len(sizes)
    return [function(task) for task in tasks]


def find(
    work: Path,
    texts: Sequence[str],
    settings: DedupConfig,
    *,
    per_partition: int = 50,
    sources: Sequence[str] = ("one",),
    run: Callable[..., list[Any]] = run_inline,
    **options: Any,
) -> tuple[Duplicates, Fates]:
    """Write a corpus, look for duplicates, and read the decisions."""
    partitions = write_documents(work, texts, settings, per_partition, sources)
    duplicates = find_duplicates(run, partitions, settings, work, **options)
    return duplicates, read_fates(work, len(texts), per_partition)


def write_documents(
    work: Path,
    texts: Sequence[str],
    settings: DedupConfig,
    per_partition: int,
    sources: Sequence[str] = ("one",),
) -> list[PartitionKeys]:
    """Write the text tables and key tables of a corpus, and return the partitions.

    Partitions are assigned to the sources in turn. Only even ordinals are used, as if every second document had been rejected.
    """
    partitions = []
    index = load_benchmarks(settings.benchmarks, settings.benchmark_words)
    for number, begin in enumerate(range(0, len(texts), per_partition)):
        members = texts[begin : begin + per_partition]
        ids = [document_id(number, 2 * place) for place in range(len(members))]
        name = f"{number:06d}"
        with TableWriter(work / "text" / name, _TEXT_SCHEMA) as table, KeyWriter(work / "keys" / name, settings) as keys:
            for first in range(0, len(members), _ROWS):
                rows = slice(first, first + _ROWS)
                batch = TextBatch([text.encode() for text in members[rows]])
                places = [[f"{number}.txt"] * len(batch), range(first + 1, first + 1 + len(batch))]
                columns = zip([ids[rows], *places, members[rows]], _TEXT_SCHEMA.types, strict=True)
                table.write(pa.record_batch([pa.array(values, kind) for values, kind in columns], _TEXT_SCHEMA))
                keys.add(ids[rows], sign(batch, range(len(batch)), settings), index.count(batch))
        partitions.append(PartitionKeys(number, sources[number % len(sources)], len(members)))
    return partitions


def read_fates(work: Path, num_documents: int, per_partition: int) -> Fates:
    """Read the tables of all partitions. Document ids are replaced by indices in the corpus."""
    rows = [
        row
        for number in range(-(-num_documents // per_partition))
        for batch in read_batches(work / "duplicates" / f"{number:06d}")
        for row in batch.to_pylist()
    ]
    place = {row["id"]: index for index, row in enumerate(rows)}
    return Fates([row["fate"] for row in rows], [place[row["leader"]] for row in rows], [row["split_key"] for row in rows])


def found_pairs(work: Path, per_partition: int) -> set[Pair]:
    """Return the pairs of similar documents, including equal ones, as indices in the corpus with the later one first."""
    tables = [path.with_suffix("") for path in (work / "duplicates").glob("*.arrow") if re.search("verify|copies", path.name)]
    later, earlier = (_places(ids, per_partition) for ids in read_pairs(tables, *_ALL_IDS))
    return set(zip(later, earlier, strict=True))


def _places(ids: np.ndarray, per_partition: int) -> list[int]:
    return ((ids >> np.uint64(32)) * np.uint64(per_partition) + (ids & np.uint64(0xFFFFFFFF)) // np.uint64(2)).tolist()


def shingles_of(text: str, num_words: int) -> set[tuple[str, ...]]:
    """Return the shingles of an ASCII text: its runs of `num_words` words. A slow and simple reference."""
    words = re.findall(r"[a-z0-9_']+", text.lower())
    return {tuple(words[place : place + num_words]) for place in range(max(len(words) - num_words + 1, min(len(words), 1)))}


def true_pairs(texts: Sequence[str], settings: DedupConfig) -> dict[Pair, float]:
    """Return all pairs whose similarity reaches the threshold, the later document first, with their similarity.

    Every pair with a common shingle is compared, so the result is exact.
    """
    sets = [shingles_of(text, settings.shingle_words) for text in texts]
    owners = defaultdict(list)
    for place, members in enumerate(sets):
        for member in members:
            owners[member].append(place)
    common = Counter(pair for places in owners.values() for pair in combinations(places, 2))
    similarity = {(later, earlier): n / (len(sets[later]) + len(sets[earlier]) - n) for (earlier, later), n in common.items()}
    return {pair: value for pair, value in similarity.items() if value >= settings.threshold}


def naive_fates(num_documents: int, copies: dict[int, int], similar: Iterable[Pair], max_cluster: int) -> list[tuple[int, int]]:
    """Return fate and leader of each document, decided one by one. Shares no code with the product."""
    earlier_of = defaultdict(set)
    for later, earlier in similar:
        earlier_of[later].add(earlier)
    absorbed: Counter[int] = Counter()
    decided: list[tuple[int, int]] = []
    for document in range(num_documents):
        if document in copies:
            decided.append((1, decided[copies[document]][1]))
            continue
        kept = (other for other in sorted(earlier_of[document]) if decided[other][0] == 0 and absorbed[other] < max_cluster)
        leader = next(kept, document)
        absorbed[leader] += leader != document
        decided.append((0 if leader == document else 2, leader))
    return decided


def plant(
    num_bases: int, rates: Sequence[float], *, families: bool = False, seed: int = 0, num_words: int = 300
) -> tuple[list[str], list[tuple[int, float | None]]]:
    """Return passages of the source code of the standard library and edited copies of them, in random order.

    Each passage has one copy, with an edit rate taken from `rates` in turn. In families it has one copy for each rate. Also
    returns, for each text, the number of its passage and the share of words that were replaced, removed or inserted (None for the
    original).
    """
    generator = random.Random(seed)
    bases = list(_bases(num_bases, num_words))
    vocabulary = sorted({word for base in bases for word in base})
    made: list[tuple[Sequence[str], tuple[int, float | None]]] = []
    for number, base in enumerate(bases):
        made.append((base, (number, None)))
        for rate in rates if families else [rates[number % len(rates)]]:
            made.append((edit(base, rate, vocabulary, generator), (number, rate)))
    generator.shuffle(made)
    return [textwrap.fill(" ".join(words), 100) for words, _ in made], [origin for _, origin in made]


def _bases(num_bases: int, num_words: int) -> Iterator[list[str]]:
    words: list[str] = []
    for path in sorted(code_files(standard_library())):
        words += re.findall(r"[A-Za-z0-9_']+", path.read_text("utf-8", "ignore"))
        while len(words) >= num_words:
            yield words[:num_words]
            del words[:num_words]
            num_bases -= 1
            if not num_bases:
                return
    raise AssertionError("the standard library has too few passages")


def edit(words: Sequence[str], rate: float, vocabulary: Sequence[str], generator: random.Random) -> list[str]:
    """Return `words` with the share `rate` of them replaced, removed, or followed by another word."""
    edited: list[str] = []
    for word in words:
        kind = generator.choice(("replace", "remove", "insert")) if generator.random() < rate else "keep"
        if kind in ("keep", "insert"):
            edited.append(word)
        if kind in ("replace", "insert"):
            edited.append(generator.choice(vocabulary))
    return edited
