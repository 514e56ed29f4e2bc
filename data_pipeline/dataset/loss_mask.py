"""The loss mask: which tokens the model is trained to predict, as lengths of runs.

The tokens of a sequence, a document or a row, are cut into runs that alternate: without loss, with loss, and so on. The first is
empty if the sequence begins with a loss. A sequence without runs has a loss on every token.

Shape suffixes: B sequences, N runs of all sequences, S segments of all sequences, T tokens of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class LossMask:
    runs_N: NDArray[np.uint32]
    num_runs_B: Int64s

    @staticmethod
    def of(has_loss_T: NDArray[np.bool_], sizes_B: Int64s) -> LossMask:
        ends_B = np.cumsum(sizes_B)
        begins_T = np.zeros(len(has_loss_T), np.bool_)
        begins_T[(ends_B - sizes_B)[sizes_B > 0]] = True
        is_new_sequence = begins_T.copy()
        begins_T[1:] |= has_loss_T[1:] != has_loss_T[:-1]
        begins = np.flatnonzero(begins_T)
        has_loss, is_first = has_loss_T[begins], is_new_sequence[begins]
        sequences = np.searchsorted(ends_B, begins, side="right")
        is_plain_B = np.bincount(sequences[~has_loss], minlength=len(sizes_B)) == 0  # a loss on every token: no runs
        kept = ~is_plain_B[sequences]
        lengths, sequences = np.diff(begins, append=len(has_loss_T))[kept], sequences[kept]
        empty_first = np.flatnonzero((is_first & has_loss)[kept])
        return LossMask(
            np.insert(lengths, empty_first, 0).astype(np.uint32),
            np.bincount(np.insert(sequences, empty_first, sequences[empty_first]), minlength=len(sizes_B)),
        )

    @staticmethod
    def in_column(runs: pa.ListArray) -> LossMask:
        return LossMask(runs.flatten().to_numpy(), np.diff(runs.offsets.to_numpy()).astype(np.int64))

    def has_loss(self, sizes_B: Int64s) -> NDArray[np.bool_]:
        """Return whether each token has a loss, shape [T], for sequences with these numbers of tokens."""
        ends_B = np.cumsum(self.num_runs_B)
        return (number_tokens(ends_B - self.num_runs_B, ends_B, self.runs_N, sizes_B) & 1).astype(np.bool_)

    def check(self, sizes_B: Int64s) -> None:
        """Raise ValueError if the runs do not fit these numbers of tokens, or one after the first is empty."""
        ends_B = np.cumsum(self.num_runs_B)
        sums = np.concatenate([[0], np.cumsum(self.runs_N, dtype=np.int64)])
        wrong = np.flatnonzero((self.num_runs_B > 0) & (sums[ends_B] - sums[ends_B - self.num_runs_B] != sizes_B))
        if len(wrong):
            place = int(wrong[0])
            found = int(sums[ends_B[place]] - sums[ends_B[place] - self.num_runs_B[place]])
            raise ValueError(f"the runs of a loss mask have {found} tokens, but there are {int(sizes_B[place])}")
        is_first_N = np.zeros(len(self.runs_N), np.bool_)
        is_first_N[(ends_B - self.num_runs_B)[self.num_runs_B > 0]] = True
        if not (self.runs_N[~is_first_N] > 0).all():
            raise ValueError("a run of a loss mask is empty, but only the first one may be")

    def num_targets(self, segments_S: NDArray[Any], num_segments_B: Int64s) -> Int64s:
        """Return the number of targets in each segment, shape [S]: tokens with a loss, except the first of the segment."""
        ends_S = np.cumsum(segments_S, dtype=np.int64)
        starts_S = ends_S - segments_S
        borders = np.concatenate([[0], np.cumsum(num_segments_B)])
        before = np.concatenate([[0], ends_S])
        ends_B = np.cumsum(self.num_runs_B)
        numbers, lengths = _with_rest(ends_B - self.num_runs_B, ends_B, self.runs_N, np.diff(before[borders]))
        with_loss = lengths * (numbers & 1)
        run_starts, losses_before = np.cumsum(lengths) - lengths, np.cumsum(with_loss) - with_loss

        def num_before(places_S: Int64s) -> Int64s:
            run_S = np.searchsorted(run_starts, places_S, side="right") - 1
            counts: Int64s = losses_before[run_S] + (places_S - run_starts[run_S]) * (numbers[run_S] & 1)
            return counts

        return num_before(ends_S) - num_before(np.minimum(starts_S + 1, ends_S))


def number_tokens(firsts_B: Int64s, ends_B: Int64s, runs_N: NDArray[Any], sizes_B: Int64s) -> NDArray[np.int32]:
    """Return the index of each token's run `runs_N[first:end]` in its sequence, and -1 after the last run, shape [T]."""
    numbers, lengths = _with_rest(firsts_B, ends_B, runs_N, sizes_B)
    return np.repeat(numbers.astype(np.int32), lengths)


def _with_rest(firsts_B: Int64s, ends_B: Int64s, runs_N: NDArray[Any], sizes_B: Int64s) -> tuple[Int64s, Int64s]:
    """Return number and length of all runs. Each sequence has one more run, with number -1: its remaining tokens."""
    entries_B = ends_B - firsts_B + 1
    last = np.cumsum(entries_B) - 1
    numbers = np.arange(int(entries_B.sum()), dtype=np.int64) - np.repeat(last - entries_B + 1, entries_B)
    source = np.minimum(np.repeat(firsts_B, entries_B) + numbers, max(len(runs_N) - 1, 0))
    lengths = runs_N[source].astype(np.int64) if len(runs_N) else np.zeros(len(source), np.int64)
    lengths[last] = 0
    totals = np.add.reduceat(lengths, last - entries_B + 1) if len(last) else lengths
    lengths[last] = sizes_B - totals
    numbers[last] = -1
    return numbers, lengths
