"""Measures recall, precision and speed of the search for near-duplicates, on planted copies.

    python -m tests.benchmarks.duplicates

Passages of 300 words from the source code of the standard library are copied with 0 to 30 % of their words replaced, removed or
inserted. The reference is the exact Jaccard similarity of every pair of documents, computed from Python sets of words without code
of the pipeline. A pair at or above the threshold is a duplicate. With 30 % edited words the similarity is about 0.1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from data_pipeline.config import DedupConfig
from data_pipeline.dedup.duplicates import find_duplicates
from data_pipeline.dedup.keys import choose_bands, sign
from data_pipeline.text import TextBatch
from tests.support.duplicates import found_pairs, naive_fates, plant, read_fates, run_inline, true_pairs, write_documents

RATES = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.1, 0.2, 0.3)
PER_PARTITION = 1000
BATCH = 500

Pair = tuple[int, int]


def signing_speed(texts: Sequence[str], settings: DedupConfig) -> float:
    """Return the bytes per second at which keys are computed for documents whose words are known."""
    batches = [TextBatch([text.encode() for text in texts[begin : begin + BATCH]]) for begin in range(0, len(texts), BATCH)]
    for batch in batches:
        assert len(batch.word_hashes_W) == batch.words_D1[-1]
    begin = time.perf_counter()
    for batch in batches:
        sign(batch, range(len(batch)), settings)
    return sum(len(batch.bytes_N) for batch in batches) / (time.perf_counter() - begin)


def ratio(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "-"


def true_and_found(truth: Set[Any], found: Set[Any]) -> str:
    both = len(truth & found)
    return f"recall {ratio(both, len(truth))}, precision {ratio(both, len(found))}"


def passages_with_copies(origins: Sequence[tuple[int, float | None]]) -> Iterator[tuple[float, Pair]]:
    """Yield the edit rate of each copy, and the indices of the copy and its passage, the later one first."""
    passages = {number: place for place, (number, rate) in enumerate(origins) if rate is None}
    for place, (number, rate) in enumerate(origins):
        if rate is not None:
            yield rate, (max(place, passages[number]), min(place, passages[number]))


def print_rates(origins: Sequence[tuple[int, float | None]], truth: set[Pair], found: set[Pair]) -> None:
    print("edited words   copies   similar to the passage    found   recall")
    planted = list(passages_with_copies(origins))
    for rate in RATES:
        copies = [pair for of_rate, pair in planted if of_rate == rate]
        similar = [pair for pair in copies if pair in truth]
        num_found = sum(pair in found for pair in similar)
        print(f"{rate:12.1%} {len(copies):8,} {len(similar):24,} {num_found:8,}   {ratio(num_found, len(similar))}")


def measure(num_passages: int, settings: DedupConfig, *, families: bool) -> None:
    texts, origins = plant(num_passages, RATES, families=families)
    megabytes = sum(map(len, texts)) / 1e6
    truth = set(true_pairs(texts, settings))
    with tempfile.TemporaryDirectory() as folder:
        partitions = write_documents(Path(folder), texts, settings, PER_PARTITION)
        begin = time.perf_counter()
        duplicates = find_duplicates(run_inline, partitions, settings, Path(folder))
        seconds = time.perf_counter() - begin
        found = found_pairs(Path(folder), PER_PARTITION)
        fates = read_fates(Path(folder), len(texts), PER_PARTITION)
    print(f"{len(texts):,} documents, {megabytes:.1f} MB, {'families of ' + str(len(RATES) + 1) if families else 'pairs'}")
    print(f"keys {signing_speed(texts, settings) / 1e6:.0f} MB/s without word splitting; stage {megabytes / seconds:.1f} MB/s")
    print(f"{duplicates.candidates:,} candidates, {duplicates.similar:,} of them similar")
    if not families:
        joined = {pair for pair in truth if fates.split_keys[pair[0]] == fates.split_keys[pair[1]]}
        print(f"pairs: recall {ratio(len(joined), len(truth))} (in one cluster), precision {ratio(len(found & truth), len(found))}")
    copies = {place: leader for place, (fate, leader) in enumerate(zip(fates.fates, fates.leaders, strict=True)) if fate == 1}
    wanted = {place for place, (fate, _) in enumerate(naive_fates(len(texts), copies, truth, settings.max_cluster)) if fate}
    dropped = {place for place, fate in enumerate(fates.fates) if fate}
    print(f"documents to drop: {true_and_found(wanted, dropped)}")
    apart = sum(
        fates.fates[one] == fates.fates[other] == 0 and fates.split_keys[one] != fates.split_keys[other] for one, other in truth
    )
    print(f"similar pairs that are kept and may be split between training and validation: {apart}\n")
    if not families:
        print_rates(origins, truth, found)
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=3000, help="number of passages that are copied")
    parser.add_argument("--threshold", type=float, default=0.8)
    options = parser.parse_args()
    settings = DedupConfig(threshold=options.threshold)
    bands = choose_bands(settings)
    print(f"threshold {settings.threshold}: {bands.num_bands} bands of {bands.num_rows}\n")
    measure(options.passages, settings, families=False)
    measure(options.passages // len(RATES), settings, families=True)


if __name__ == "__main__":
    main()
