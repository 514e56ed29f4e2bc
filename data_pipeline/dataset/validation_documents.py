"""Kind and length of each validation document, by which an evaluation groups its losses.

A row holds pieces of documents and their ids. The tables in `documents/` say what each id stands for. They have one row for each
document of the validation split, and no text.

Shape suffix: D documents.
"""

# ruff: noqa: N815 - names of arrays carry their shape

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import PreparedDataError
from data_pipeline.config import KINDS
from data_pipeline.dataset.layout import DOCUMENTS, DOCUMENTS_SCHEMA
from data_pipeline.dataset.manifest import Manifest, check_digests
from data_pipeline.dataset.tables import read_checked

__all__ = ["ValidationDocuments", "read_validation_documents"]


@dataclass(frozen=True)
class ValidationDocuments:
    """The documents of the validation split, in ascending order of their ids."""

    ids_D: NDArray[np.uint64]
    kinds_D: NDArray[np.uint8]
    """Index in `kinds`."""
    tokens_D: NDArray[np.uint32]
    """Tokens of the whole document, bos and eos included."""
    kinds: tuple[str, ...] = KINDS

    def find(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        places = np.minimum(np.searchsorted(self.ids_D, ids), max(len(self.ids_D) - 1, 0))
        wrong = np.ones(len(ids), np.bool_) if not len(self.ids_D) else self.ids_D[places] != ids
        if wrong.any():
            raise PreparedDataError(
                f"document {int(ids[wrong][0])} is in a validation row, but not in the tables of {DOCUMENTS}/; run `prepare` again"
            )
        return places


def read_validation_documents(directory: Path, manifest: Manifest) -> ValidationDocuments | None:
    """Return the validation documents of prepared data; None for data of an earlier version, which has no such tables."""
    names = sorted(name for name in manifest.files if name.startswith(f"{DOCUMENTS}/") and name.endswith(".arrow"))
    digests = {name: manifest.files[name] for name in names}
    if not digests:
        return None
    check_digests(directory, digests)
    tables = [read_checked(directory / name, DOCUMENTS_SCHEMA, "kind", len(KINDS)) for name in digests]
    ids_D, kinds_D, tokens_D = (
        np.concatenate([table.column(name).to_numpy() for table in tables]) for name in DOCUMENTS_SCHEMA.names
    )
    order = np.argsort(ids_D)
    return ValidationDocuments(ids_D[order], kinds_D[order], tokens_D[order])
