"""Computes the keys that documents are compared by: a digest of their letters, and MinHash bands of their shingles.

Equal digests find equal documents, equal bands find candidates for similar ones. A shingle is a run of `dedup.shingle_words`
words; a shorter text is one shingle. The share of common shingles of two texts is their Jaccard similarity J. Each number of their
MinHash signatures is equal with probability J (Broder, 1997). A signature is cut into bands of r numbers. Two texts are candidates
if they agree in at least one of b bands, with probability 1 - (1 - J^r)^b (Leskovec, Rajaraman and Ullman, Mining of Massive
Datasets, section 3.4).
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import rensa
from numpy.typing import NDArray

from data_pipeline.config import DedupConfig, Kind
from data_pipeline.text.batch import TextBatch
from data_pipeline.text.ngrams import mix_hashes

__all__ = ["DIGEST_BYTES", "Bands", "Keys", "Shingles", "choose_bands", "fold_digest", "shingle", "sign"]

DIGEST_BYTES = 16

Hashes = NDArray[np.uint64]
Int64s = NDArray[np.int64]

_SEED = 0x5EED  # of the hash functions; part of the result
_RECALL_AT_THRESHOLD = 0.99  # for pairs whose similarity is exactly the threshold; a higher recall only costs time in verification
_LOWER = bytes.maketrans(string.ascii_uppercase.encode(), string.ascii_lowercase.encode())
_WHITE_SPACE = string.whitespace.encode()
_NO_LETTERS = _WHITE_SPACE + string.punctuation.encode()


@dataclass(frozen=True)
class Bands:
    """The bands of a signature: `num_bands` times `num_rows` numbers."""

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
    """The keys of D documents."""

    digests_D: NDArray[np.void]
    """16 bytes each."""
    bands_DB: Hashes
    """One key for each band; no bands (B = 0) if near-duplicates are not searched for."""
    has_words_D: NDArray[np.bool_]
    """False for a text without words: it has no shingles, so its bands are meaningless."""

    def __len__(self) -> int:
        return len(self.digests_D)


def choose_bands(settings: DedupConfig) -> Bands:
    """Return the longest bands, which give the fewest false candidates, that still find pairs at the threshold."""
    for num_rows in range(settings.num_hashes, 1, -1):
        bands = Bands(settings.num_hashes // num_rows, num_rows)
        if bands.probability(settings.threshold) >= _RECALL_AT_THRESHOLD:
            return bands
    return Bands(settings.num_hashes, 1)


def fold_digest(text: bytes, kind: Kind) -> bytes:
    """Return 16 bytes of BLAKE2b of a text without white space; prose and web text also without case and ASCII punctuation."""
    if kind == "code":
        folded = text.translate(None, _WHITE_SPACE)
    elif text.isascii():
        folded = text.translate(_LOWER, _NO_LETTERS)
    else:
        folded = "".join(text.decode().lower().split()).encode().translate(None, _NO_LETTERS)
    return hashlib.blake2b(folded or text, digest_size=DIGEST_BYTES).digest()


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


def sign(batch: TextBatch, indices: Sequence[int] | Int64s, kinds: Sequence[Kind], settings: DedupConfig) -> Keys:
    chosen = np.asarray(indices, np.int64)
    starts, ends = batch.starts_D[chosen].tolist(), batch.ends_D[chosen].tolist()
    digests = b"".join(
        fold_digest(batch.bytes_N[start:end].tobytes(), kind) for start, end, kind in zip(starts, ends, kinds, strict=True)
    )
    digests_D = np.frombuffer(digests, f"V{DIGEST_BYTES}")
    has_words_D = np.diff(batch.words_D1)[chosen] > 0
    if not settings.near:
        return Keys(digests_D, np.empty((len(chosen), 0), np.uint64), has_words_D)
    return Keys(digests_D, band_keys(shingle(batch, settings.shingle_words), chosen, settings), has_words_D)


def band_keys(shingles: Shingles, chosen: Int64s, settings: DedupConfig) -> Hashes:
    bands = choose_bands(settings)
    if not len(chosen):
        return np.empty((0, bands.num_bands), np.uint64)
    counts = np.diff(shingles.borders_D1)[chosen]
    borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    hashes = shingles.hashes_S
    if len(chosen) < len(shingles.borders_D1) - 1:
        is_chosen_D = np.zeros(len(shingles.borders_D1) - 1, np.bool_)
        is_chosen_D[chosen] = True
        hashes = hashes[np.repeat(is_chosen_D, np.diff(shingles.borders_D1))]
    num_numbers = bands.num_bands * bands.num_rows
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, borders, num_numbers, _SEED)
    numbers_DBR = np.array(matrix.to_rows(), np.uint64).reshape(len(chosen), bands.num_bands, bands.num_rows)
    keys_DB = np.broadcast_to(mix_hashes(np.arange(1, bands.num_bands + 1, dtype=np.uint64)), numbers_DBR.shape[:2])
    for row in range(bands.num_rows):
        keys_DB = mix_hashes(keys_DB + numbers_DBR[:, :, row])
    return keys_DB
