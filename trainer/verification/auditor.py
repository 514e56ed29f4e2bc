"""Checks the lines of a ledger, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from data_pipeline.dataset.shards import Rows, ShardError
from trainer.data.mixture import MixedOrder
from trainer.data.order import RowOrder, UniformOrder
from trainer.run.ledger import LedgerEvent, LedgerStep, digest_of_rows

__all__ = ["MAX_COUNTED_ROWS", "MAX_LEFT_OUT", "AuditReport", "Auditor", "Skipped", "Targets", "difference"]

MAX_COUNTED_ROWS = 1 << 26
"""Rows that are counted one by one, which takes 4 bytes each; beyond that the comparison with the order has to do."""
MAX_LEFT_OUT = 1 << 26
"""Positions in all windows that a run has left out: beyond it the ledger is refused, because each of them is gone through."""
_ROWS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Skipped:
    """Positions of the order that no step may be trained on from then on, because the run said so."""

    after_step: int
    start: int
    count: int
    reason: str

    @property
    def end(self) -> int:
        """The first position after them."""
        return self.start + self.count


@dataclass
class AuditReport:
    """What was found; whatever is wrong is raised instead."""

    steps: int = 0
    positions: int = 0
    """Rows of the order that are used up: those that steps were trained on, and those that were left out."""
    targets: int = 0
    lines: int = 0
    left_out: int = 0
    """Of these, those that no step was trained on."""
    skipped: list[Skipped] = field(default_factory=list)
    """The windows because of which they were left out."""
    withheld: list[int] = field(default_factory=list)
    """Steps whose update the guard withheld, so that they changed no weight."""
    orders: list[dict[str, Any]] = field(default_factory=list)
    """The step after which each order of the rows began, and what it follows from."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What else happened."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Rows trained on by source, a row as often as it was used."""
    padding: dict[str, int] = field(default_factory=dict)
    """Rows by source that stood in a step as padding, because their shard was in quarantine."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows that there are, by source."""
    counted: bool = True
    """Whether every row was counted, or there were too many."""
    quarantined: list[str] = field(default_factory=list)
    """Shards that were left out from some step on."""
    uncounted: int = 0
    """Rows trained on before, whose targets nobody can count any more."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints that agree with the ledger."""

    def describe(self) -> str:
        """The report for people."""
        sources = ", ".join(map(self._describe_source, self.drawn))
        skipped = ", ".join(
            f"positions {one.start} to {one.end - 1}, said after step {one.after_step} ({one.reason})" for one in self.skipped
        )
        counting = "no row twice before all others once" if self.counted else "rows not counted one by one: there are too many"
        lines = [
            f"ledger       {self.lines} lines, each follows from those before",
            f"steps        1 to {self.steps}, each once; {self.positions:,} positions without a gap, {self.targets:,} targets",
            f"rows         those of the order in every step; {counting}",
            f"sources      {sources or 'none yet'}",
            f"left out     {f'{self.left_out:,} rows: {skipped}' if skipped else 'nothing'}",
            f"withheld     {', '.join(map(str, self.withheld)) or 'no update'}",
            f"checkpoints  {', '.join(map(str, self.checkpoints)) or 'none'}: counters and ledger agree",
        ]
        if self.quarantined:
            lost = (
                f"; the targets of {self.uncounted} of their rows before that cannot be counted any more" if self.uncounted else ""
            )
            lines.append(f"quarantine   {', '.join(self.quarantined)}{lost}")
        lines += [f"order        another one from step {order['step'] + 1} on" for order in self.orders[1:]]
        lines += [f"event        {event['event']} after step {event['step']}" for event in self.events]
        return "\n".join(lines)

    def _describe_source(self, name: str) -> str:
        drawn, num_rows, padding = self.drawn[name], self.rows[name], self.padding[name]
        apart = f", and {padding:,} as padding" if padding else ""
        return f"{name} {drawn:,} of {num_rows:,} ({drawn / max(1, num_rows):.2f} passes{apart})"

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        return asdict(self)


class Auditor:
    """Follows a ledger line by line.

    Args:
        path: the ledger's, for messages.
        build: the order that an `order` event describes; raises where that cannot be.
        targets: counts the targets of rows.
        num_rows: all rows that there are.
    """

    def __init__(
        self,
        path: Path,
        build: Callable[[Mapping[str, Any]], RowOrder],
        targets: Targets,
        num_rows: int,
    ) -> None:
        self.report = AuditReport(counted=num_rows <= MAX_COUNTED_ROWS)
        self._path = path
        self._build = build
        self._targets = targets
        self._num_rows = num_rows
        self._order: RowOrder | None = None
        self._passes_N = np.empty(0, np.int32)

    def follow(self, entry: LedgerStep | LedgerEvent) -> NDArray[np.int64]:
        """Checks one line; returns the rows that were trained on, which are none for an event.

        Raises:
            CheckpointError: the line says what cannot be; the message names it.
        """
        self.report.lines = entry.head.lines
        try:
            if isinstance(entry, LedgerStep):
                return self._step(entry)
            self._event(entry)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._wrong(entry, f"it lacks a fact, or has a wrong one ({error})") from None
        return np.empty(0, np.int64)

    def _step(self, entry: LedgerStep) -> NDArray[np.int64]:
        report, step = self.report, entry.head.step
        if step != report.steps + 1:
            raise self._wrong(entry, f"step {step} follows step {report.steps}")
        expected = next_position(report.positions, entry.count, report.skipped)
        if entry.start != expected:
            kind = "left out" if entry.start > expected else "used again"
            first, last = sorted((entry.start, expected))
            raise self._wrong(
                entry,
                f"step {step} begins at position {entry.start}, so positions {first} to {last - 1} were {kind} without a word",
            )
        while expected > report.positions:  # in parts, because a window can be large
            count = min(expected - report.positions, _ROWS_AT_A_TIME)
            report.left_out += count
            self._rows(entry, report.positions, count)
        rows = self._rows(entry, entry.start, entry.count)
        if entry.epoch != entry.start // self._num_rows:
            raise self._wrong(entry, f"position {entry.start} is in epoch {entry.start // self._num_rows}, not in {entry.epoch}")
        if digest := difference(entry, rows):
            raise self._wrong(entry, f"the rows of step {step} have the digest {entry.digest}, those of the order {digest}")
        found = self._targets.count(rows)
        if not found <= entry.targets <= found + self._targets.num_hidden(rows):
            raise self._wrong(entry, f"step {step} is said to have {entry.targets} targets, but its rows have {found}")
        report.steps, report.targets = step, report.targets + entry.targets
        if not entry.applied:
            report.withheld.append(step)
        return rows

    def _event(self, entry: LedgerEvent) -> None:
        facts = {"event": entry.kind, "step": entry.head.step, **entry.facts}
        if entry.kind == "gap":
            raise CheckpointError(
                f"{self._path}: it was moved away before step {entry.head.step + 1}, so what the steps before were trained on "
                "cannot be proven; restore the whole ledger from a copy"
            )
        if entry.head.step != self.report.steps:
            raise self._wrong(entry, f"event {entry.kind} after step {entry.head.step}, but the last step is {self.report.steps}")
        if entry.kind == "order":
            self._order = self._build(entry.facts)
            self._passes_N = np.full(self._num_rows if self.report.counted else 0, -1, np.int32)
            self.report.orders.append(facts)
        elif entry.kind == "skip":
            start, count = int(entry.facts["start"]), int(entry.facts["count"])
            if start < self.report.positions or count < 1:
                raise self._wrong(
                    entry, f"{count} positions from {start} on cannot be left out any more: {self.report.positions} are used"
                )
            if count > MAX_LEFT_OUT - sum(window.count for window in self.report.skipped):
                raise self._wrong(entry, f"windows of more than {MAX_LEFT_OUT} positions are left out")
            self.report.skipped.append(Skipped(entry.head.step, start, count, str(entry.facts.get("reason", ""))))
        else:
            self.report.events.append(facts)
        if entry.kind == "quarantine":
            self.report.quarantined += entry.facts["shards"]
            self._targets.quarantine(entry.facts["shards"])

    def _rows(self, entry: LedgerStep | LedgerEvent, start: int, count: int) -> NDArray[np.int64]:
        """The rows at the next positions, after a look that none of them comes too early."""
        if self._order is None:
            raise self._wrong(entry, "no line before it says which order the rows follow")
        rows = self._order.rows_at(start, count)
        if self.report.counted:
            passes_B = passes_at(self._order, start, count)
            for number in np.unique(passes_B):  # one, and at the end of an epoch two
                here = rows[passes_B == number]
                again = np.concatenate((here[self._passes_N[here] >= number], _repeated(here)))
                if len(again):
                    raise self._wrong(entry, f"row {again[0]} comes again before all others have come")
                self._passes_N[here] = number
        self.report.positions += count
        return rows

    def _wrong(self, entry: LedgerStep | LedgerEvent, finding: str) -> CheckpointError:
        return CheckpointError(f"{self._path}, line {entry.head.lines}: {finding}; the ledger is not that of this run and data")


def next_position(position: int, count: int, windows: Iterable[Skipped]) -> int:
    """Where a batch of `count` rows begins that would begin at `position`, but may touch none of these windows.

    The loader has its own, which this one does not rest on.
    """
    for window in sorted(windows, key=lambda window: window.start):
        if window.start < position + count and position < window.end:
            position = window.end
    return position


def passes_at(order: RowOrder, start: int, count: int) -> NDArray[np.int32]:
    """How often all rows, or those of the source that is drawn from, were gone through before each position, shape (count,)."""
    positions = np.arange(start, start + count, dtype=np.int64)
    if isinstance(order, MixedOrder):
        cycles, places = np.divmod(positions, len(order.source_M))
        sources = order.source_M[places]
        sizes = np.array([source.order.num_rows for source in order.sources], np.int64)
        draws = cycles * order.counts_K[sources] + order.drawn_M[places]
        return (draws // sizes[sources]).astype(np.int32)
    assert isinstance(order, UniformOrder)
    return (positions // order.num_rows).astype(np.int32)


def _repeated(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those that stand there more than once."""
    values, counts = np.unique(numbers, return_counts=True)
    return values[counts > 1]


class Targets:
    """Counts targets as the run did, with its quarantine, and as far as the shards of that quarantine can still be read."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._quarantined: set[str] = set()
        self._lost: dict[str, ShardError | OSError] = {}
        self.uncounted = 0

    def quarantine(self, shards: Iterable[str]) -> None:
        """From here on, rows of these shards are padding."""
        self._quarantined |= set(shards)

    def count(self, rows_B: NDArray[np.int64]) -> int:
        """Targets of these rows; none in those that cannot be read."""
        return int(self._rows.without(self._quarantined | self._lost.keys(), self._note).num_targets(rows_B).sum())

    def num_hidden(self, rows_B: NDArray[np.int64]) -> int:
        """How many more they may have had."""
        lost = self._rows.num_rows_in(self._lost.keys() - self._quarantined, rows_B)
        self.uncounted += lost
        return lost * (self._rows.row_length - 1)

    def check_excused(self) -> None:
        """Raises what reading a shard met that the run has never put into quarantine."""
        for shard, error in self._lost.items():
            if shard not in self._quarantined:
                raise error

    def _note(self, error: ShardError | OSError) -> None:
        shard = self._rows.shard_of(error)
        assert shard is not None
        self._lost[shard] = error


def difference(entry: LedgerStep, rows: NDArray[np.int64]) -> str:
    """The digest of these rows where it is another than the ledger's, else nothing."""
    digest = digest_of_rows(rows)
    return "" if digest == entry.digest else digest
