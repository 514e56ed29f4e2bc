"""Decontamination: finds the documents that share runs of words with a benchmark.

`dedup.benchmark_words` consecutive words count, 13 as for GPT-3 (Brown et al., 2020, appendix C). A shorter benchmark text counts
as a whole from 8 words on; everyday phrases would match shorter ones. Runs are compared by 64-bit hashes: for a benchmark of a
million runs, a chance match is expected once in 10^13 words.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from common.errors import SourceError
from common.files import MAX_DEPTH, is_deeper
from data_pipeline.text import Hashes, Int64s, TextBatch

_SHORTEST_RUN = 8  # words
_FILTER_BITS = 22
_FILTER_MASK = np.uint64((1 << _FILTER_BITS) - 1)
_BATCH_ITEMS = 1 << 12
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*+\n)++")


@dataclass(frozen=True)
class Runs:
    """The runs of one length, in ascending order of their hashes. A run of several items is listed for each."""

    num_words: int
    hashes: Hashes
    items: Int64s
    is_likely: NDArray[np.bool_]  # whether any run has these lowest bits of a hash: rejects most words

    def find(self, batch: TextBatch) -> tuple[Int64s, Int64s]:
        """Return the document of each run in the texts that is one of these, and the first place of the run in `hashes`."""
        grams = batch.ngrams(self.num_words)
        likely = np.flatnonzero(self.is_likely[grams.hashes_G & _FILTER_MASK])
        hashes = grams.hashes_G[likely]
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        is_run = self.hashes[places] == hashes
        return np.searchsorted(grams.borders_D1, likely[is_run], "right") - 1, places[is_run]


@dataclass(frozen=True)
class BenchmarkIndex:
    lengths: tuple[Runs, ...]
    num_items: int

    def count(self, batch: TextBatch) -> NDArray[np.uint32]:
        counts_D = np.zeros(len(batch), np.uint32)
        for runs in self.lengths:
            counts_D += np.bincount(runs.find(batch)[0], minlength=len(batch)).astype(np.uint32)
        return counts_D

    def overlaps(self, batch: TextBatch) -> list[tuple[int, int]]:
        """Return the pairs of a document and an item that share a run, with repetitions."""
        pairs: list[tuple[int, int]] = []
        for runs in self.lengths:
            documents, first = runs.find(batch)
            found, places = all_matches(runs.hashes[first], runs.hashes)
            pairs += zip(documents[found].tolist(), runs.items[places].tolist(), strict=True)
        return pairs


def all_matches(wanted: Hashes, known: Hashes) -> tuple[Int64s, Int64s]:
    """Return the index in `wanted` and in `known` of every equal pair. `known` is sorted."""
    first = np.searchsorted(known, wanted)
    counts = np.searchsorted(known, wanted, "right") - first
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(wanted)), counts), np.repeat(first, counts) + step


@lru_cache(maxsize=2)
def load_benchmarks(paths: tuple[Path, ...], num_words: int) -> BenchmarkIndex:
    return index_items([item for path in paths for item in read_items(path)], num_words)


def read_items(path: Path) -> Iterator[list[str]]:
    """Yield the texts of each item of a benchmark: all strings in a line of .jsonl, or one paragraph of .txt."""
    if path.suffix not in (".jsonl", ".txt"):
        raise SourceError(f"{path}: unsupported format; benchmarks are read from .jsonl and .txt files")
    if not path.is_file():
        raise SourceError(f"{path}: no such benchmark file; correct the path")
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if path.suffix == ".txt":
        try:
            text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
            yield from ([paragraph] for paragraph in _BLANK_LINES.split(text) if paragraph.strip())
        except UnicodeDecodeError as error:
            raise SourceError(f"{path}: not UTF-8 ({error}); convert the benchmark file to UTF-8") from None
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                value = orjson.loads(line)
                if is_deeper(value):
                    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
                yield list(_strings(value))
            except ValueError as error:
                raise SourceError(f"{path}:{number}: not valid JSON ({error}); write one JSON value per line") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _strings(member)


def index_items(items: Sequence[list[str]], num_words: int) -> BenchmarkIndex:
    hashes: dict[int, list[Hashes]] = {}
    owners: dict[int, list[Int64s]] = {}
    for begin in range(0, len(items), _BATCH_ITEMS):
        texts = [(number, text) for number, item in enumerate(items[begin : begin + _BATCH_ITEMS], begin) for text in item]
        batch = TextBatch([text.encode("utf-8", "replace") for _, text in texts])
        item_D = np.array([number for number, _ in texts], np.int64)
        words_D = np.diff(batch.words_D1)
        for length in range(min(_SHORTEST_RUN, num_words), num_words + 1):
            grams = batch.ngrams(length)
            is_wanted_D = words_D >= num_words if length == num_words else words_D == length
            counts_D = np.diff(grams.borders_D1)
            hashes.setdefault(length, []).append(grams.hashes_G[np.repeat(is_wanted_D, counts_D)])
            owners.setdefault(length, []).append(np.repeat(item_D[is_wanted_D], counts_D[is_wanted_D]))
    lengths = []
    for length, parts in hashes.items():
        hashes_of_runs, items_of_runs = np.concatenate(parts), np.concatenate(owners[length])
        if len(hashes_of_runs):
            order = np.lexsort((items_of_runs, hashes_of_runs))
            is_likely = np.zeros(1 << _FILTER_BITS, np.bool_)
            is_likely[hashes_of_runs & _FILTER_MASK] = True
            lengths.append(Runs(length, hashes_of_runs[order], items_of_runs[order], is_likely))
    return BenchmarkIndex(tuple(lengths), len(items))
