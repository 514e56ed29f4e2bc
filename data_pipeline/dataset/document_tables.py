"""Facts about documents in tables beside the shards, which hold only the ids of documents. Shape suffix: D documents.

`documents/` has kind and length of each validation document, `labels/` the label of each document if there are labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import KINDS
from data_pipeline.dataset.layout import DOCUMENTS, LABELS, MAX_LABELS
from data_pipeline.dataset.manifest import Manifest, check_digests
from data_pipeline.dataset.tables import DOCUMENTS_SCHEMA, LABELS_SCHEMA, check_values, read_table

_MAX_NAME_CHARS = 1024


@dataclass(frozen=True)
class ValidationDocuments:
    ids_D: NDArray[np.uint64]
    kinds_D: NDArray[np.uint8]  # index in `kinds`
    tokens_D: NDArray[np.uint32]  # of the whole document, bos and eos included
    kinds: tuple[str, ...] = KINDS

    def find(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        return _find(self.ids_D, ids, "a validation row", DOCUMENTS)


@dataclass(frozen=True)
class DocumentLabels:
    ids_D: NDArray[np.uint64]
    labels_D: NDArray[np.uint16]  # index in `label_names`

    def find(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        return self.labels_D[_find(self.ids_D, ids, "a row", LABELS)].astype(np.int64)


def read_validation_documents(directory: Path, manifest: Manifest) -> ValidationDocuments | None:
    """None for data of an earlier version, which has no such tables."""
    names = [name for name in manifest.files if name.startswith(f"{DOCUMENTS}/")]
    if not names:
        return None
    ids_D, kinds_D, tokens_D = _read(directory, manifest, names, DOCUMENTS_SCHEMA, "kind", len(KINDS))
    return ValidationDocuments(ids_D, kinds_D, tokens_D)


def read_document_labels(directory: Path, manifest: Manifest, split: str) -> DocumentLabels:
    num_labels = len(label_names(directory, manifest))
    names = [name for name in manifest.files if name.startswith(f"{LABELS}/{split}-")]
    return DocumentLabels(*_read(directory, manifest, names, LABELS_SCHEMA, "label", num_labels))


def label_names(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    found = manifest.totals.get("labels")
    if found is None:
        raise ConfigError(
            f"{directory}: its documents have no labels; run `prepare` with --records.label_field and the name of the field that "
            "holds them"
        )
    names = found.get("names") if isinstance(found, dict) else None
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS for name in names)
        or not 2 <= len(names) <= MAX_LABELS
        or names != sorted(set(names))
    ):
        raise PreparedDataError(
            f"{directory}: the labels in its manifest are not a list of 2 to {MAX_LABELS} sorted names; run `prepare` again"
        )
    return tuple(names)


def _read(
    directory: Path, manifest: Manifest, names: Sequence[str], schema: pa.Schema, column: str, bound: int
) -> list[NDArray[Any]]:
    """Return the columns of some tables together, in ascending order of the documents' ids.

    The values of `column` are below `bound`.
    """
    names = sorted(name for name in names if name.endswith(".arrow"))
    check_digests(directory, {name: manifest.files[name] for name in names})
    tables = [schema.empty_table()]
    for name in names:
        try:
            table = read_table((directory / name).with_suffix(""))
            check_values(table, [schema], {column: bound})
        except (pa.ArrowException, ValueError) as error:
            raise PreparedDataError(f"{directory / name}: this table cannot be read ({error}); run `prepare` again") from None
        tables.append(table)
    columns = [np.concatenate([table.column(name).to_numpy() for table in tables]) for name in schema.names]
    order = np.argsort(columns[0])
    return [values[order] for values in columns]


def _find(ids_D: NDArray[np.uint64], ids: NDArray[np.uint64], where: str, folder: str) -> NDArray[np.int64]:
    places = np.minimum(np.searchsorted(ids_D, ids), max(len(ids_D) - 1, 0))
    is_unknown = ids_D[places] != ids if len(ids_D) else np.ones(len(ids), np.bool_)
    if is_unknown.any():
        raise PreparedDataError(
            f"document {int(ids[is_unknown][0])} is in {where}, but not in the tables of {folder}/; run `prepare` again"
        )
    return places
