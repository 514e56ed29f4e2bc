from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from common.errors import ConfigError, PreparedDataError
from common.settings.messages import explain
from common.settings.model import Section
from data_pipeline.config import KINDS, PackingConfig
from data_pipeline.dataset.layout import CHOSEN, LOSS_RUNS, MANIFEST, TOKENS
from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.manifest import MASKED_FORMAT, Manifest, check_digests
from data_pipeline.dataset.splits import SPLITS, Split
from data_pipeline.dataset.tables import CHOSEN_SCHEMA, check_values, data_path, read_batches, read_side_by_side, tokens_schema
from data_pipeline.documents import partition_of
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

_SectionT = TypeVar("_SectionT", bound=Section)


@dataclass(frozen=True)
class PublishedDocument:
    id: int
    source: str
    split: Split
    metadata: str
    text: str


def check_tokens_kept(directory: Path, manifest: Manifest) -> None:
    if not settings_in(manifest, "packing", PackingConfig).keep_tokens:
        raise ConfigError(f"{directory} was prepared with packing.keep_tokens = false; prepare it again with true")
    for number in range(len(manifest.partitions)):
        for folder in (TOKENS, CHOSEN):
            if not (path := data_path(directory / folder / f"{number:06d}")).is_file():
                raise PreparedDataError(f"{path}: missing; run `prepare` again")


def settings_in(manifest: Manifest, name: str, section: type[_SectionT], **changes: object) -> _SectionT:
    values = manifest.config.get(name)
    if not isinstance(values, dict):
        raise PreparedDataError(f"{MANIFEST}: the settings of {name} are missing; run `prepare` again")
    try:
        return section(**values | changes)
    except ValidationError as error:
        raise PreparedDataError(f"{MANIFEST}: config: {explain(section, error, name)}; run `prepare` again") from None


def read_documents(directory: Path, manifest: Manifest, split: Split) -> Iterator[PublishedDocument]:
    """Yield the documents of one split in order, each once, even if it is used several times."""
    check_tokens_kept(directory, manifest)
    tokenizer = read_tokenizer(directory, manifest)
    for number, partition in enumerate(manifest.partitions):
        for batch in _taken(directory, manifest, number):
            on_side_D = batch.column("split").to_numpy() == SPLITS.index(split)
            yield from _decode(batch.filter(pa.array(on_side_D)), partition["source"], tokenizer)


def read_document(directory: Path, manifest: Manifest, identity: int) -> PublishedDocument:
    check_tokens_kept(directory, manifest)
    number = partition_of(identity)
    if 0 <= number < len(manifest.partitions):
        for batch in _taken(directory, manifest, number):
            found = batch.filter(pa.array(batch.column("id").to_numpy() == identity))
            if found.num_rows:
                return next(_decode(found, manifest.partitions[number]["source"], read_tokenizer(directory, manifest)))
    raise ConfigError(f"{directory} has no document {identity}; the column `documents` of the shards contains the ids")


def check_tables(directory: Path, manifest: Manifest, number: int) -> None:
    """Check every value that is used as an index: digests only prove that the tables are as they were written."""
    names = [f"{folder}/{number:06d}.arrow" for folder in (TOKENS, CHOSEN)]
    if missing := [name for name in names if name not in manifest.files]:
        raise PreparedDataError(f"{directory / MANIFEST}: {missing[0]} is not listed; run `prepare` again")
    check_digests(directory, {name: manifest.files[name] for name in names})
    plain, masked = (tokens_schema(np.dtype(manifest.token_type), has_mask=has_mask) for has_mask in (False, True))
    of_tokens = [plain, masked] if manifest.format == MASKED_FORMAT else [plain]
    bounds = {"split": len(SPLITS), "kind": len(KINDS), "tokens": manifest.vocab_size}
    num_rows = {TOKENS: 0, CHOSEN: 0}
    try:
        for folder, schemas in ((TOKENS, of_tokens), (CHOSEN, [CHOSEN_SCHEMA])):
            for batch in read_batches(directory / folder / f"{number:06d}"):
                check_values(batch, schemas, bounds)
                if LOSS_RUNS in batch.schema.names:
                    runs = batch.column(LOSS_RUNS)
                    if runs.flatten().null_count:
                        raise ValueError(f"a run of {LOSS_RUNS} is null")
                    LossMask.in_column(runs).check(np.diff(batch.column("tokens").offsets.to_numpy()))
                num_rows[folder] += batch.num_rows
        if num_rows[TOKENS] != num_rows[CHOSEN]:
            raise ValueError(f"{num_rows[TOKENS]} documents, but {num_rows[CHOSEN]} numbers of copies")
    except (pa.ArrowException, ValueError) as error:
        raise PreparedDataError(
            f"{directory / names[0]} and {names[1]}: these tables cannot be read ({error}); run `prepare` again"
        ) from None


def read_tokenizer(directory: Path, manifest: Manifest) -> Tokenizer:
    check_digests(directory, {name: digest for name, digest in manifest.files.items() if name.startswith("tokenizer/")})
    tokenizer = load_tokenizer(directory / "tokenizer")
    if (tokenizer.kind, tokenizer.vocab_size) != (manifest.tokenizer_kind, manifest.vocab_size):
        raise PreparedDataError(
            f"{directory / 'tokenizer'}: {tokenizer.kind} with {tokenizer.vocab_size} ids, but the manifest says "
            f"{manifest.tokenizer_kind} with {manifest.vocab_size}; run `prepare` again"
        )
    return tokenizer


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
