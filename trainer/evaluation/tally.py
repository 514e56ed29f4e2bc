from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.text import columns
from data_pipeline.dataset.document_tables import ValidationDocuments, read_validation_documents
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.text_bytes import TextBytes, count_text_bytes
from trainer.data.batch import IGNORE, MicroBatch
from trainer.runs.events import EvalEvent, MeasuresEvent, Score

NUM_PARTS = 257  # integers of a sum: one for each exponent of a finite number, the number of infinities, the number of NaNs

_INFINITE, _NAN = 255, 256
_SMALLEST = 149


# Sums of fp32 numbers without rounding. A fp32 number is an integer of 24 bits times a power of two (IEEE 754), so numbers with the
# same exponent can be added as integers. The sums therefore depend neither on the order nor on the process, and the sums of parts
# add up to the sum of the whole. Shape suffixes: G groups, N numbers, E exponents.


def add_exactly(parts_GE: NDArray[np.int64], groups_N: NDArray[np.int64], values_N: NDArray[np.float32]) -> None:
    """Add each value to the sum of its group, in place. A sum can hold 2^39 values. Both infinities count as the same."""
    bits_N = values_N.view(np.uint32)
    exponents_N = ((bits_N >> 23) & 0xFF).astype(np.int64)
    mantissas_N = (bits_N & 0x7FFFFF).astype(np.int64)
    mantissas_N += (exponents_N > 0).astype(np.int64) << 23  # the leading bit, which is not stored
    mantissas_N[np.signbit(values_N)] *= -1
    exponents_N[np.isnan(values_N)] = _NAN
    mantissas_N[exponents_N >= _INFINITE] = 1
    np.add.at(parts_GE.reshape(-1), groups_N * NUM_PARTS + exponents_N, mantissas_N)


def exact_sum(parts_E: NDArray[np.int64]) -> Fraction:
    """Return a sum as a fraction. Raises ValueError if a value of it is not finite."""
    if parts_E[_INFINITE] or parts_E[_NAN]:
        raise ValueError("values that are not finite have no exact sum")
    units = sum(int(parts_E[exponent]) << max(exponent - 1, 0) for exponent in np.flatnonzero(parts_E).tolist())
    return Fraction(units, 1 << _SMALLEST)


def rounded_sum(parts_E: NDArray[np.int64]) -> float:
    """Return a sum as the nearest fp64 number: NaN if it has a NaN, else infinity if it has an infinity."""
    if parts_E[_NAN]:
        return math.nan
    return math.inf if parts_E[_INFINITE] else float(exact_sum(parts_E))


@dataclass(frozen=True)
class Evaluation:
    """The validation loss, in total and by group."""

    loss: float
    """Mean over all targets, in nats."""
    num_rows: int
    num_targets: int
    num_bytes: int = 0
    """UTF-8 bytes of the targets' text, 0 if they were not counted."""
    by_source: Mapping[str, Score] = field(default_factory=dict)
    by_kind: Mapping[str, Score] = field(default_factory=dict)
    """Scores by the kind of the target's document: `prose`, `web` or `code` (see `Grouping.documents` for older data)."""
    by_length: Mapping[str, Score] = field(default_factory=dict)
    """Scores by the length in tokens of the target's document, shortest first: see `length_ranges`."""
    measured: Callable[[int], MeasuresEvent] | None = None
    """Returns the event with the measures of the objective at a step; None if it has none. With them the loss is that of the
    objective, so there is no perplexity."""

    @property
    def total(self) -> Score:
        return Score(self.loss, self.num_targets, self.num_bytes, self.measured is None)

    @property
    def perplexity(self) -> float | None:
        return self.total.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        return self.total.bits_per_byte

    @property
    def groups(self) -> dict[str, Mapping[str, Score]]:
        return self.event(0).groups

    def event(self, step: int) -> EvalEvent:
        total = self.total
        by_source, by_kind, by_length = (
            {name: replace(score, has_perplexity=total.has_perplexity) for name, score in scores.items()}
            for scores in (self.by_source, self.by_kind, self.by_length)
        )
        return EvalEvent(
            step,
            self.loss,
            self.num_targets,
            total.bits_per_byte,
            by_source=by_source,
            by_kind=by_kind,
            by_length=by_length,
            num_rows=self.num_rows,
            has_perplexity=total.has_perplexity,
        )


def describe_evaluation(evaluation: Evaluation, step: int, by: Sequence[str]) -> str:
    total = evaluation.total
    per_byte = "" if total.bits_per_byte is None else f"  bits per byte {total.bits_per_byte:.4f}"
    perplexity = "" if total.perplexity is None else f"  perplexity {total.perplexity:.2f}"
    first = (
        f"step {step}  validation loss {total.loss:.4f}{perplexity}{per_byte}  "
        f"({total.num_targets:,} targets in {evaluation.num_rows:,} rows)"
    )
    tables = [_table(name, evaluation.groups[name], total.num_targets) for name in by]
    return "\n\n".join([first, *tables])


def _table(name: str, groups: Mapping[str, Score], num_targets: int) -> str:
    has_perplexity = any(score.has_perplexity for score in groups.values())
    cells = [(name, "loss", *(["perplexity"] if has_perplexity else []), "bits/byte", "targets", "share")]
    for group, score in groups.items():
        perplexity = [] if score.perplexity is None else [f"{score.perplexity:.2f}"]
        per_byte = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        share = f"{score.num_targets / max(1, num_targets):.1%}"
        cells.append((group, f"{score.loss:.4f}", *perplexity, per_byte, f"{score.num_targets:,}", share))
    return columns(cells)


_TARGETS, _BYTES = NUM_PARTS, NUM_PARTS + 1  # columns of a tally behind the columns of the sum


@dataclass(frozen=True)
class Grouping:
    kinds: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    """The kind of each source, in the order of the manifest's sources. It counts only if `documents` is None."""
    text_bytes: TextBytes | None = None  # counts the bytes of targets, None if they are not counted
    bos_id: int | None = None  # the token before the first target of a text, None if the tokenizer has no such token
    documents: ValidationDocuments | None = None
    """Kind and length of each document. None: data of an earlier version, grouped by kind of source and by length of piece."""

    @staticmethod
    def of(directory: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> Grouping:
        """Takes some seconds for a vocabulary of 100,000 pieces. Without a tokenizer bytes are not counted."""
        reported = manifest.totals.get("sources", {})
        kinds = {name: reported.get(name, {}).get("kind") or "unknown" for name in manifest.sources}
        documents = read_validation_documents(directory, manifest)
        if tokenizer is None:
            return Grouping(kinds, documents=documents)
        return Grouping(kinds, count_text_bytes(tokenizer), tokenizer.bos_id, documents)


UNDIVIDED = Grouping()  # no groups: the total alone


class Tally:
    """Sums over targets by source, by kind and by length: exact losses, number of targets, bytes."""

    def __init__(self, grouping: Grouping, row_length: int) -> None:
        documents = grouping.documents
        self._grouping = grouping
        self._kinds = tuple(dict.fromkeys(grouping.kinds.values())) if documents is None else documents.kinds
        self._kind_of_source = np.array([self._kinds.index(kind) for kind in grouping.kinds.values()] if documents is None else [])
        longest = row_length if documents is None else max(2, int(documents.tokens_D.max(initial=0)))
        self._ranges = length_ranges(longest)
        self._highs = np.array([int(name.split("-")[-1]) for name in self._ranges])
        self.table_GK = np.zeros((len(grouping.kinds) + len(self._kinds) + len(self._ranges), NUM_PARTS + 2), np.int64)
        """A row for each source, kind and range of lengths: `NUM_PARTS` integers of the sum, targets, bytes."""
        self.by_source, self.by_kind, self.by_length = np.split(self.table_GK, [len(grouping.kinds), -len(self._ranges)])

    def add(
        self,
        losses_BL: NDArray[np.float32],
        batch: MicroBatch,
        sources_B: NDArray[np.int64],
        ids: Sequence[NDArray[np.uint64]] = (),
    ) -> None:
        """`ids` has the ids of the documents of each row, in order. They are needed if the grouping has documents."""
        tokens_BL, targets_BL = batch.tokens.numpy(), batch.targets.numpy()
        is_target_BL = targets_BL != IGNORE
        targets_N, losses_N = targets_BL[is_target_BL], losses_BL[is_target_BL]
        sources_N = np.repeat(sources_B, is_target_BL.sum(axis=1))
        if (documents := self._grouping.documents) is None:
            positions_BL = batch.positions.numpy()
            firsts = np.flatnonzero(positions_BL == 0)  # padding is a piece too
            lengths = np.diff(firsts, append=positions_BL.size)
            lengths_N = np.repeat(lengths, lengths).reshape(positions_BL.shape)[is_target_BL]
            kinds_N = self._kind_of_source[sources_N]
        else:
            firsts_B = np.cumsum([0, *map(len, ids)])[:-1]
            chosen_N = documents.find(np.concatenate(ids))[(firsts_B[:, None] + batch.segments.numpy())[is_target_BL]]
            kinds_N, lengths_N = documents.kinds_D[chosen_N].astype(np.int64), documents.tokens_D[chosen_N].astype(np.int64)
        ranges_N = np.searchsorted(self._highs, lengths_N)
        bytes_N = np.zeros(len(targets_N), np.int64)
        if self._grouping.text_bytes is not None:
            bos_id = -1 if self._grouping.bos_id is None else self._grouping.bos_id
            bytes_N = self._grouping.text_bytes.count(targets_N, is_first_T=tokens_BL[is_target_BL] == bos_id)
        for rows_GK, groups_N in ((self.by_source, sources_N), (self.by_kind, kinds_N), (self.by_length, ranges_N)):
            sums_GE = np.zeros((len(rows_GK), NUM_PARTS), np.int64)
            add_exactly(sums_GE, groups_N, losses_N)
            rows_GK[:, :NUM_PARTS] += sums_GE
            np.add.at(rows_GK[:, _TARGETS], groups_N, 1)
            np.add.at(rows_GK[:, _BYTES], groups_N, bytes_N)

    def evaluation(self, num_rows: int) -> Evaluation:
        total = _score(self.by_source.sum(axis=0))
        if self._grouping is UNDIVIDED:
            return Evaluation(total.loss, num_rows, total.num_targets)
        return Evaluation(
            total.loss,
            num_rows,
            total.num_targets,
            total.num_bytes,
            by_source=_scores(self._grouping.kinds, self.by_source),
            by_kind=_scores(self._kinds, self.by_kind),
            by_length=_scores(self._ranges, self.by_length),
        )


def length_ranges(longest: int) -> list[str]:
    """Return ranges of lengths in tokens: `2`, `3-4`, `5-8`, … up to `longest`, which is at least 2."""
    highs = [min(2 << number, longest) for number in range((longest - 1).bit_length())]
    lows = [2, *(high + 1 for high in highs[:-1])]
    return [f"{low}-{high}" if low < high else str(high) for low, high in zip(lows, highs, strict=True)]


def _scores(names: Iterable[str], sums: Iterable[NDArray[np.int64]]) -> dict[str, Score]:
    scores = {name: _score(sums_K) for name, sums_K in zip(names, sums, strict=True)}
    return {name: score for name, score in scores.items() if score.num_targets}


def _score(sums_K: NDArray[np.int64]) -> Score:
    num_targets = int(sums_K[_TARGETS])
    loss = rounded_sum(sums_K[:NUM_PARTS]) / num_targets if num_targets else math.nan
    return Score(loss, num_targets, int(sums_K[_BYTES]))
