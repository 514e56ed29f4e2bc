"""Reads prepared data by document: text and place of any document, which its tokens were kept for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.documents import partition_of
from data_pipeline.errors import ConfigError, PreparedDataError
from data_pipeline.manifest import Manifest, check_digests
from data_pipeline.split import SPLITS, Split
from data_pipeline.tasks import data_path, read_side_by_side
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "CHOSEN",
    "TOKENS",
    "PublishedDocument",
    "check_tables",
    "check_tokenizer",
    "check_tokens_kept",
    "read_document",
    "read_documents",
]

TOKENS, CHOSEN = "tokens", "chosen"
"""Folders with a table for each partition: its tokenised documents, and how often each of them was taken."""


@dataclass(frozen=True)
class PublishedDocument:
    """A document that went into rows."""

    id: int
    source: str
    split: Split
    metadata: str
    text: str


def check_tokens_kept(directory: Path, manifest: Manifest) -> None:
    """Refuses prepared data that holds rows only.

    Raises:
        ConfigError: it was prepared with packing.keep_tokens = false.
        PreparedDataError: a table is missing.
    """
    if not manifest.config["packing"]["keep_tokens"]:
        raise ConfigError(f"{directory} was prepared with packing.keep_tokens = false; prepare it again with true")
    for number in range(len(manifest.partitions)):
        for folder in (TOKENS, CHOSEN):
            if not (path := data_path(directory / folder / f"{number:06d}")).is_file():
                raise PreparedDataError(f"{path}: missing; run `prepare` again")


def read_documents(directory: Path, manifest: Manifest, split: Split) -> Iterator[PublishedDocument]:
    """The documents of one side in their order, each once, however often it was taken.

    Raises:
        ConfigError: it was prepared without keeping the tokens.
        PreparedDataError: a table or the tokenizer is missing or changed.
    """
    check_tokens_kept(directory, manifest)
    tokenizer = _tokenizer(directory, manifest)
    for number, partition in enumerate(manifest.partitions):
        for batch in _taken(directory, manifest, number):
            on_side_D = batch.column("split").to_numpy() == SPLITS.index(split)
            yield from _decode(batch.filter(pa.array(on_side_D)), partition["source"], tokenizer)


def read_document(directory: Path, manifest: Manifest, identity: int) -> PublishedDocument:
    """One document by its id.

    Raises:
        ConfigError: there is no such document, or it was rejected.
        PreparedDataError: its table or the tokenizer is missing or changed.
    """
    check_tokens_kept(directory, manifest)
    number = partition_of(identity)
    if 0 <= number < len(manifest.partitions):
        for batch in _taken(directory, manifest, number):
            found = batch.filter(pa.array(batch.column("id").to_numpy() == identity))
            if found.num_rows:
                return next(_decode(found, manifest.partitions[number]["source"], _tokenizer(directory, manifest)))
    raise ConfigError(f"{directory} holds no document {identity}; ids stand in the column `documents` of the shards")


def check_tables(directory: Path, manifest: Manifest, number: int) -> None:
    """Compares the tables of a partition with the manifest, before they are mapped: what is in them then is what was written.

    Raises:
        PreparedDataError: one is missing or changed.
    """
    names = (f"{folder}/{number:06d}.arrow" for folder in (TOKENS, CHOSEN))
    check_digests(directory, {name: manifest.files[name] for name in names})


def check_tokenizer(directory: Path, manifest: Manifest) -> None:
    """Compares the files of the tokenizer with the manifest.

    Raises:
        PreparedDataError: one is missing or changed.
    """
    check_digests(directory, {name: digest for name, digest in manifest.files.items() if name.startswith("tokenizer/")})


def _tokenizer(directory: Path, manifest: Manifest) -> Tokenizer:
    check_tokenizer(directory, manifest)
    return load_tokenizer(directory / "tokenizer")


def _taken(directory: Path, manifest: Manifest, number: int) -> Iterator[pa.RecordBatch]:
    check_tables(directory, manifest, number)
    for batch, chosen in read_side_by_side(directory / TOKENS / f"{number:06d}", directory / CHOSEN / f"{number:06d}"):
        yield batch.filter(pa.array(chosen.column("copies").to_numpy() > 0))


def _decode(batch: pa.RecordBatch, source: str, tokenizer: Tokenizer) -> Iterator[PublishedDocument]:
    tokens = batch.column("tokens")
    ends = np.cumsum(np.diff(tokens.offsets.to_numpy())).tolist()
    ids = tokens.flatten().to_numpy()
    start = 0
    columns = (batch.column(name).to_pylist() for name in ("id", "split", "metadata"))
    for identity, split, metadata, end in zip(*columns, ends, strict=True):
        yield PublishedDocument(identity, source, SPLITS[split], metadata or "", tokenizer.decode(ids[start:end].tolist()))
        start = end
