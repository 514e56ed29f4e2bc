"""Rows whose targets are the labels of their documents: one target for each document, at its last token.

B rows   L tokens of a row   P documents of the rows
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.dataset.document_tables import read_document_labels
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from trainer.data.batch import IGNORE

__all__ = ["LabelledRows"]


class LabelledRows(Rows):
    """The rows of one split with the labels of their documents. It keeps 10 bytes in memory for each document of the split."""

    def __init__(self, directory: Path, manifest: Manifest, split: str, *, verify: bool = True) -> None:
        """Open the rows, and read the labels.

        Raises:
            ConfigError: the data has no labels.
            PreparedDataError: a table of labels is missing or damaged.
        """
        super().__init__(directory, manifest, split, verify=verify)
        self._labels = read_document_labels(directory, manifest, split)

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        """Return the rows with these numbers, with a target at the last token of each document."""
        rows = super().read(indices)
        segments_BL = rows.segments_BL
        is_last_BL = segments_BL >= 0
        is_last_BL[:, :-1] &= segments_BL[:, :-1] != segments_BL[:, 1:]
        # A shard that failed in `read` may be readable here, so the number of documents comes from the tokens that were read.
        ids = [self.document_ids(number)[: int(is_last_BL[row].sum())] for row, number in enumerate(indices.tolist())]
        targets_BL = np.full(segments_BL.shape, IGNORE, np.int64)
        targets_BL[is_last_BL] = self._labels.find(np.concatenate(ids))
        return replace(rows, targets_BL=targets_BL)

    def num_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of documents in each of these rows, shape [B]. No token is read."""
        return np.array([len(self.document_ids(number)) for number in indices.tolist()], np.int64)

    def num_sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the same, because each document has one target."""
        return self.num_targets(indices)
