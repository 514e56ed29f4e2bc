"""Computes and stores the keys that documents are compared by: a digest of their text, and MinHash bands of their shingles.

A shingle is a run of `dedup.shingle_words` words; a shorter text is one. Each number of two MinHash signatures is equal with
probability J, the share of common shingles (Broder, 1997). Texts are candidates if they agree in one of b bands of r numbers, with
probability 1 - (1 - J^r)^b (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4).

Keys are stored in the order of the documents, and as sorted runs with entries of 16 bytes: key, place in the partition, 32 more
bits of the digest. Equal documents have 95 equal bits. Two different ones among 10^10 do with a probability of one in 800 million.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import rensa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig
from data_pipeline.dataset.tables import TableWriter, read_batches
from data_pipeline.text import Hashes, Int64s, TextBatch, mix_hashes

DIGEST_BYTES = 16


_SEED = 0x5EED  # of the hash functions; part of the result
_RECALL_AT_THRESHOLD = 0.99  # for pairs whose similarity is exactly the threshold; a higher recall only costs time in verification


@dataclass(frozen=True)
class Bands:
    num_bands: int
    num_rows: int

    def probability(self, similarity: float) -> float:
        return 1 - float((1 - similarity**self.num_rows) ** self.num_bands)


@dataclass(frozen=True)
class Shingles:
    """The shingles of some texts, concatenated. A shingle that occurs twice in a text is listed twice."""

    hashes_S: Hashes
    borders_D1: Int64s

    def of(self, index: int) -> Hashes:
        return np.unique(self.hashes_S[self.borders_D1[index] : self.borders_D1[index + 1]])


@dataclass(frozen=True)
class Keys:
    digests_D: NDArray[np.void]  # 16 bytes each
    bands_DB: Hashes  # no bands (B = 0) if near-duplicates are not searched for
    has_words_D: NDArray[np.bool_]  # a text without words has no shingles, so its bands are meaningless

    def __len__(self) -> int:
        return len(self.digests_D)


def choose_bands(settings: DedupConfig) -> Bands:
    """Return the longest bands, which give the fewest false candidates, that still find pairs at the threshold."""
    for num_rows in range(settings.num_hashes, 1, -1):
        bands = Bands(settings.num_hashes // num_rows, num_rows)
        if bands.probability(settings.threshold) >= _RECALL_AT_THRESHOLD:
            return bands
    return Bands(settings.num_hashes, 1)


def text_digest(text: bytes, label: str = "") -> bytes:
    """Return 16 bytes of BLAKE2b of the label and of the text, in which any run of ASCII white space is one space."""
    return hashlib.blake2b(b" ".join(text.split()), digest_size=DIGEST_BYTES, key=_label_key(label)).digest()


def _label_key(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=DIGEST_BYTES).digest() if label else b""


def shingle(batch: TextBatch, num_words: int) -> Shingles:
    """Return the hashes of all shingles of a batch. A shorter text has one shingle of all its words; without words, none."""
    grams = batch.ngrams(num_words)
    short_D = np.flatnonzero((np.diff(batch.words_D1) > 0) & (np.diff(grams.borders_D1) == 0))
    if not len(short_D):
        return Shingles(grams.hashes_G, grams.borders_D1)
    whole = batch.hash_of_words(batch.words_D1[short_D], batch.words_D1[short_D + 1])
    counts_D = np.diff(grams.borders_D1)
    counts_D[short_D] = 1
    return Shingles(
        np.insert(grams.hashes_G, grams.borders_D1[short_D], whole), np.concatenate([[0], np.cumsum(counts_D)]).astype(np.int64)
    )


def sign(
    batch: TextBatch,
    indices: Sequence[int] | Int64s,
    settings: DedupConfig,
    labels: Sequence[str] = (),
    masks: Sequence[str] = (),
) -> Keys:
    """Return the keys of the chosen texts. Texts with other labels have other keys, and texts with other masks another digest."""
    chosen = np.asarray(indices, np.int64)
    starts, ends = batch.starts_D[chosen].tolist(), batch.ends_D[chosen].tolist()
    nothing = [""] * len(chosen)
    of_each = [label + mask for label, mask in zip(labels or nothing, masks or nothing, strict=True)]
    digests = b"".join(
        text_digest(batch.bytes_N[start:end].tobytes(), label) for start, end, label in zip(starts, ends, of_each, strict=True)
    )
    digests_D = np.frombuffer(digests, f"V{DIGEST_BYTES}")
    has_words_D = np.diff(batch.words_D1)[chosen] > 0
    bands = choose_bands(settings)
    if not settings.near or not len(chosen):
        return Keys(digests_D, np.empty((len(chosen), bands.num_bands if settings.near else 0), np.uint64), has_words_D)
    shingles = shingle(batch, settings.shingle_words)
    counts_D = np.diff(shingles.borders_D1)
    is_chosen_D = np.zeros(len(batch), np.bool_)
    is_chosen_D[chosen] = True
    hashes = shingles.hashes_S if is_chosen_D.all() else shingles.hashes_S[np.repeat(is_chosen_D, counts_D)]
    borders = np.concatenate([[0], np.cumsum(counts_D[chosen])]).astype(np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, borders, bands.num_bands * bands.num_rows, _SEED)
    numbers_DBR = np.array(matrix.to_rows(), np.uint64).reshape(len(chosen), bands.num_bands, bands.num_rows)
    keys_DB = np.broadcast_to(mix_hashes(np.arange(1, bands.num_bands + 1, dtype=np.uint64)), numbers_DBR.shape[:2])
    for row in range(bands.num_rows):
        keys_DB = mix_hashes(keys_DB + numbers_DBR[:, :, row])
    if labels:
        keys_DB = keys_DB ^ np.frombuffer(b"".join(_label_key(label)[:8] for label in labels), np.uint64)[:, None]
    return Keys(digests_D, keys_DB, has_words_D)


KEYS_SCHEMA = pa.schema([("id", pa.uint64()), ("digest", pa.binary(DIGEST_BYTES)), ("overlaps", pa.uint32())])
"""One row for each row of the text table. `overlaps` is the number of runs of words shared with a benchmark."""
ENTRIES_SCHEMA = pa.schema([("key", pa.uint64()), ("check", pa.uint32()), ("ordinal", pa.uint32())])
"""Each record batch is a run in ascending order of the keys. The lowest bit of a key is 1 for digests and 0 for bands."""

_RUN_DOCUMENTS = 1 << 16  # signed documents held in memory, about 300 bytes each


class KeyWriter(ExitStack):
    """Documents must be added in ascending order of their ids."""

    def __init__(self, output: Path, settings: DedupConfig) -> None:
        super().__init__()
        self._settings = settings
        self._table = self.enter_context(TableWriter(output, KEYS_SCHEMA))
        self._runs = self.enter_context(TableWriter(entries_path(output), ENTRIES_SCHEMA))
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0

    @property
    def written(self) -> dict[Path, str]:
        return self._table.written | self._runs.written

    def add(self, ids: Sequence[int], keys: Keys, overlaps: Sequence[int] | NDArray[np.uint32] | None = None) -> None:
        """Those that overlap with a benchmark are dropped anyway, so they get no entries."""
        ids_D = np.asarray(ids, np.uint64)
        overlaps_D = np.zeros(len(ids_D), np.uint32) if overlaps is None else np.asarray(overlaps, np.uint32)
        self._table.write(pa.record_batch([ids_D, fixed_bytes(keys.digests_D), overlaps_D], schema=KEYS_SCHEMA))
        if self._settings.exact:
            is_wanted_D = overlaps_D < self._settings.benchmark_overlaps
            is_similar_D = is_wanted_D & keys.has_words_D
            halves_D2 = np.ascontiguousarray(keys.digests_D).view(np.uint64).reshape(-1, 2)
            digests, bands = halves_D2[is_wanted_D, 0] | np.uint64(1), keys.bands_DB[is_similar_D] & ~np.uint64(1)
            columns = [np.concatenate([digests, bands.ravel()])]
            for values_D in (halves_D2[:, 1].astype(np.uint32), ids_D.astype(np.uint32)):  # the lower half of an id is its ordinal
                columns.append(np.concatenate([values_D[is_wanted_D], np.repeat(values_D[is_similar_D], bands.shape[1])]))
            self._waiting.append(pa.record_batch(columns, schema=ENTRIES_SCHEMA))
            self._num_waiting += len(ids_D)
        if self._num_waiting >= _RUN_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            key, check, ordinal = (column.to_numpy() for column in pa.Table.from_batches(self._waiting, ENTRIES_SCHEMA).columns)
            order = np.argsort(key, kind="stable")
            self._runs.write(pa.record_batch([key[order], check[order], ordinal[order]], schema=ENTRIES_SCHEMA))
        self._waiting, self._num_waiting = [], 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        if kind is None:
            self._flush()
        return super().__exit__(kind, error, trace)


def entries_path(keys: Path) -> Path:
    return keys.with_name(f"{keys.name}-entries")


def fixed_bytes(values: NDArray[np.void]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(DIGEST_BYTES), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def read_digests(column: pa.Array) -> NDArray[np.void]:
    digests = np.frombuffer(column.buffers()[1], f"V{DIGEST_BYTES}")
    return digests[column.offset : column.offset + len(column)]


def read_keys(path: Path) -> tuple[NDArray[np.uint64], NDArray[np.void], NDArray[np.uint32]]:
    ids, digests, overlaps = [np.empty(0, np.uint64)], [np.empty(0, f"V{DIGEST_BYTES}")], [np.empty(0, np.uint32)]
    for batch in read_batches(path):
        ids.append(batch.column("id").to_numpy())
        digests.append(read_digests(batch.column("digest")))
        overlaps.append(batch.column("overlaps").to_numpy())
    return np.concatenate(ids), np.concatenate(digests), np.concatenate(overlaps)
