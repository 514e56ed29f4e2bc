"""The sums of an evaluation by source and by length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from data_pipeline.dataset.manifest import Manifest
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.text_bytes import TextBytes, count_text_bytes
from trainer.data.batch import IGNORE, MicroBatch
from trainer.evaluation.exact_sum import NUM_PARTS, add_exactly, rounded_sum
from trainer.evaluation.results import Evaluation, Score

__all__ = ["UNDIVIDED", "Grouping", "Tally", "length_ranges"]

_TARGETS, _BYTES = NUM_PARTS, NUM_PARTS + 1
"""Columns of a tally behind the columns of the sum."""


@dataclass(frozen=True)
class Grouping:
    """The groups of an evaluation, and how it counts bytes."""

    kinds: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    """The kind of each source, in the order of the manifest's sources."""
    text_bytes: TextBytes | None = None
    """Counts the bytes of targets, None if they are not counted."""
    bos_id: int | None = None
    """The token before the first target of a text, None if the tokenizer has no such token."""

    @staticmethod
    def of(manifest: Manifest, tokenizer: Tokenizer) -> Grouping:
        """Return the groups of prepared data. Takes some seconds for a vocabulary of 100,000 pieces."""
        reported = manifest.totals.get("sources", {})
        kinds = {name: reported.get(name, {}).get("kind") or "unknown" for name in manifest.sources}
        return Grouping(kinds, count_text_bytes(tokenizer), tokenizer.bos_id)


UNDIVIDED = Grouping()
"""No groups: the total alone."""


class Tally:
    """Sums over targets by source and by length: exact losses, number of targets, bytes."""

    def __init__(self, grouping: Grouping, row_length: int) -> None:
        self._grouping = grouping
        self._ranges = length_ranges(row_length)
        self._range_of_length = np.array([max(0, (length - 1).bit_length() - 1) for length in range(row_length + 1)])
        self.table_GK = np.zeros((len(grouping.kinds) + len(self._ranges), NUM_PARTS + 2), np.int64)
        """A row for each source, then for each range of lengths: `NUM_PARTS` integers of the sum, targets, bytes."""

    @property
    def by_source(self) -> NDArray[np.int64]:
        """The rows of the sources."""
        return self.table_GK[: len(self._grouping.kinds)]

    @property
    def by_length(self) -> NDArray[np.int64]:
        """The rows of the ranges of lengths."""
        return self.table_GK[len(self._grouping.kinds) :]

    def add(self, losses_BL: NDArray[np.float32], batch: MicroBatch, sources_B: NDArray[np.int64]) -> None:
        """Add the targets of a batch, with their losses and the source numbers of the rows."""
        tokens_BL, targets_BL, positions_BL = (tensor.numpy() for tensor in (batch.tokens, batch.targets, batch.positions))
        is_target_BL = targets_BL != IGNORE
        targets_N, losses_N = targets_BL[is_target_BL], losses_BL[is_target_BL]
        sources_N = np.repeat(sources_B, is_target_BL.sum(axis=1))
        ranges_N = self._range_of_length[_piece_lengths(positions_BL)[is_target_BL]]
        bytes_N = self._bytes(targets_N, tokens_BL[is_target_BL])
        for rows_GK, groups_N in ((self.by_source, sources_N), (self.by_length, ranges_N)):
            sums_GE = np.zeros((len(rows_GK), NUM_PARTS), np.int64)
            add_exactly(sums_GE, groups_N, losses_N)
            rows_GK[:, :NUM_PARTS] += sums_GE
            np.add.at(rows_GK[:, _TARGETS], groups_N, 1)
            np.add.at(rows_GK[:, _BYTES], groups_N, bytes_N)

    def _bytes(self, targets_N: NDArray[np.int64], tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
        counts, bos_id = self._grouping.text_bytes, self._grouping.bos_id
        if counts is None:
            return np.zeros(len(targets_N), np.int64)
        return counts.count(targets_N, is_first_T=tokens_N == (-1 if bos_id is None else bos_id))

    def evaluation(self, num_rows: int) -> Evaluation:
        """Return the means. Groups without a target are left out."""
        total = _score(self.by_source.sum(axis=0))
        if self._grouping is UNDIVIDED:
            return Evaluation(total.loss, num_rows, total.num_targets)
        kind_of_source = np.array(list(self._grouping.kinds.values()))
        kinds = list(dict.fromkeys(kind_of_source.tolist()))
        return Evaluation(
            total.loss,
            num_rows,
            total.num_targets,
            total.num_bytes,
            by_source=_scores(self._grouping.kinds, self.by_source),
            by_kind=_scores(kinds, [self.by_source[kind_of_source == kind].sum(axis=0) for kind in kinds]),
            by_length=_scores(self._ranges, self.by_length),
        )


def length_ranges(row_length: int) -> list[str]:
    """Return the ranges of lengths of a piece, in tokens: `2`, `3-4`, `5-8`, … up to the length of a row."""
    highs = [min(2 << number, row_length) for number in range((row_length - 1).bit_length())]
    lows = [2, *(high + 1 for high in highs[:-1])]
    return [f"{low}-{high}" if low < high else str(high) for low, high in zip(lows, highs, strict=True)]


def _piece_lengths(positions_BL: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each position the length of its piece. Padding is a piece too."""
    firsts = np.flatnonzero(positions_BL == 0)
    lengths = np.diff(firsts, append=positions_BL.size)
    return np.repeat(lengths, lengths).reshape(positions_BL.shape)


def _scores(names: Iterable[str], sums: Iterable[NDArray[np.int64]]) -> dict[str, Score]:
    scores = {name: _score(sums_K) for name, sums_K in zip(names, sums, strict=True)}
    return {name: score for name, score in scores.items() if score.num_targets}


def _score(sums_K: NDArray[np.int64]) -> Score:
    num_targets = int(sums_K[_TARGETS])
    loss = rounded_sum(sums_K[:NUM_PARTS]) / num_targets if num_targets else math.nan
    return Score(loss, num_targets, int(sums_K[_BYTES]))
