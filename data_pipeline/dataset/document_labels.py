"""The label of each document of a split, for data that was prepared with `records.label_field`.

The tables in `labels/` have one row for each document: its id, and the index of its label in the sorted names of the manifest. They
take 10 bytes for each document on disk and in memory.

Shape suffix: D documents.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, PreparedDataError
from data_pipeline.dataset.layout import LABELS, LABELS_SCHEMA, MAX_LABELS
from data_pipeline.dataset.manifest import Manifest, check_digests
from data_pipeline.dataset.tables import read_checked

__all__ = ["DocumentLabels", "label_names", "read_document_labels"]

_MAX_NAME_CHARS = 1024


@dataclass(frozen=True)
class DocumentLabels:
    """The labels of the documents of one split, in ascending order of the documents' ids."""

    ids_D: NDArray[np.uint64]
    labels_D: NDArray[np.uint16]
    """Index in `label_names`."""

    def find(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        places = np.minimum(np.searchsorted(self.ids_D, ids), max(len(self.ids_D) - 1, 0))
        wrong = np.ones(len(ids), np.bool_) if not len(self.ids_D) else self.ids_D[places] != ids
        if wrong.any():
            raise PreparedDataError(
                f"document {int(ids[wrong][0])} is in a row, but not in the tables of {LABELS}/; run `prepare` again"
            )
        return self.labels_D[places].astype(np.int64) if len(self.labels_D) else np.zeros(len(ids), np.int64)


def label_names(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the sorted names of the labels of prepared data."""
    found = manifest.totals.get("labels")
    if found is None:
        raise ConfigError(
            f"{directory}: its documents have no labels; run `prepare` with --records.label_field and the name of the field that "
            "holds them"
        )
    names = found.get("names") if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS for name in names):
        raise PreparedDataError(f"{directory}: the labels in its manifest are no list of names; run `prepare` again")
    if not 2 <= len(names) <= MAX_LABELS or names != sorted(set(names)):
        raise PreparedDataError(
            f"{directory}: the labels in its manifest are not 2 to {MAX_LABELS} sorted names; run `prepare` again"
        )
    return tuple(names)


def read_document_labels(directory: Path, manifest: Manifest, split: str) -> DocumentLabels:
    num_labels = len(label_names(directory, manifest))
    names = sorted(name for name in manifest.files if name.startswith(f"{LABELS}/{split}-") and name.endswith(".arrow"))
    check_digests(directory, {name: manifest.files[name] for name in names})
    tables = [read_checked(directory / name, LABELS_SCHEMA, "label", num_labels) for name in names]
    if not tables:
        return DocumentLabels(np.empty(0, np.uint64), np.empty(0, np.uint16))
    ids_D, labels_D = (np.concatenate([table.column(name).to_numpy() for table in tables]) for name in LABELS_SCHEMA.names)
    order = np.argsort(ids_D)
    return DocumentLabels(ids_D[order], labels_D[order])
