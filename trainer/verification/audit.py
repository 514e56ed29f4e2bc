"""The audit: proves from ledger, checkpoints and data which rows a run was trained on. docs/training.md says what it checks.

No row is used again before all other rows of its order were used. Rows of a shard in quarantine have no targets from the step of
its event on. If the shard cannot be read any more, the targets of its rows in earlier steps are not counted.

    B rows of a step   N rows of the order: all rows, or the rows of one source
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.terminal import printable
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows, ShardError
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.data.mixture import MixedOrder, build_order
from trainer.data.order import RowOrder, UniformOrder
from trainer.finetuning.task import saved_task
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import LedgerEvent, LedgerStep, OrderEvent, QuarantineEvent, SkipEvent, digest_of_rows, read_ledger
from trainer.runs.record import check_was_trained
from trainer.runs.saved_run import SavedRun

_SHOWN_CHARS = 300
MAX_COUNTED_ROWS = 1 << 26  # up to this number each row is counted, with 4 bytes. More are only compared with the order.
MAX_LEFT_OUT = 1 << 26  # of positions in all windows that a run leaves out. The audit visits each, so it refuses more.
_ROWS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Skipped:
    """A window of positions that an event leaves out. No later step may use them."""

    after_step: int
    start: int
    count: int
    reason: str

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class AuditReport:
    steps: int = 0
    positions: int = 0  # positions that steps were trained on, and positions that were left out
    targets: int = 0
    lines: int = 0
    left_out: int = 0
    skipped: list[Skipped] = field(default_factory=list)  # the windows of the positions that were left out
    withheld: list[int] = field(default_factory=list)  # steps whose update was skipped
    orders: list[dict[str, Any]] = field(default_factory=list)
    """The `order` events, each with the step after which the order begins."""
    events: list[dict[str, Any]] = field(default_factory=list)  # all other events
    drawn: dict[str, int] = field(default_factory=dict)
    """Rows that steps were trained on, by source. A row counts each time it is used."""
    padding: dict[str, int] = field(default_factory=dict)
    """Rows that were padding in a step because their shard was in quarantine, by source."""
    rows: dict[str, int] = field(default_factory=dict)  # of the data, by source
    counted: bool = True  # each row was counted; False if there were more than `MAX_COUNTED_ROWS`
    quarantined: list[str] = field(default_factory=list)  # shards in quarantine at the end of the ledger
    uncounted: int = 0  # rows that were used before the quarantine of their shard, so their targets cannot be counted
    checkpoints: list[int] = field(default_factory=list)  # their steps; all agree with the ledger

    def describe(self) -> str:
        sources = []
        for name, drawn in self.drawn.items():
            num_rows, padding = self.rows[name], self.padding[name]
            apart = f", and {padding:,} as padding" if padding else ""
            sources.append(f"{name} {drawn:,} of {num_rows:,} ({drawn / max(1, num_rows):.2f} passes{apart})")
        skipped = ", ".join(
            f"positions {one.start} to {one.end - 1}, announced after step {one.after_step} ({one.reason})" for one in self.skipped
        )
        counting = "no row was used twice before every row was used once" if self.counted else "too many rows to count each of them"
        lines = [
            f"ledger       {self.lines} lines, each with the digest of the line before it",
            f"steps        1 to {self.steps}, each once; {self.positions:,} positions without a gap, {self.targets:,} targets",
            f"rows         every step used the rows that the order gives; {counting}",
            f"sources      {', '.join(sources) or 'none yet'}",
            f"left out     {f'{self.left_out:,} rows: {skipped}' if skipped else 'nothing'}",
            f"withheld     {'updates of steps ' + ', '.join(map(str, self.withheld)) if self.withheld else 'no update'}",
            f"checkpoints  {', '.join(map(str, self.checkpoints)) or 'none'}: counters and ledger agree",
        ]
        if self.quarantined:
            lost = f"; the targets of {self.uncounted} of their rows in earlier steps are not counted" if self.uncounted else ""
            lines.append(f"quarantine   {', '.join(self.quarantined)}{lost}")
        lines += [f"order        a new order from step {order['step'] + 1} on" for order in self.orders[1:]]
        lines += [f"event        {event['event']} after step {event['step']}" for event in self.events]
        return "\n".join(lines)


class Auditor:
    """Follows a ledger. `build` returns the order that an `order` event describes. `targets` counts targets of rows."""

    def __init__(self, path: Path, build: Callable[[OrderEvent], RowOrder], targets: Targets, num_rows: int) -> None:
        self.report = AuditReport(counted=num_rows <= MAX_COUNTED_ROWS)
        self._path = path
        self._build = build
        self._targets = targets
        self._num_rows = num_rows
        self._order: RowOrder | None = None
        self._passes_N = np.empty(0, np.int32)

    def follow(self, entry: LedgerStep | LedgerEvent) -> NDArray[np.int64]:
        """Check one line. Return the rows of the step, none for an event."""
        self.report.lines = entry.head.lines
        try:
            if isinstance(entry, LedgerStep):
                return self._step(entry)
            self._event(entry)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._wrong(entry, f"a field is missing or invalid ({error})") from None
        return np.empty(0, np.int64)

    def _step(self, entry: LedgerStep) -> NDArray[np.int64]:
        report, step = self.report, entry.head.step
        if step != report.steps + 1:
            raise self._wrong(entry, f"step {step} follows step {report.steps}")
        expected = next_position(report.positions, entry.count, report.skipped)
        if entry.start != expected:
            kind = "left out" if entry.start > expected else "used again"
            first, last = sorted((entry.start, expected))
            unexpected = f"positions {first} to {last - 1} were {kind}, and no event says so"
            raise self._wrong(entry, f"step {step} begins at position {entry.start}, so {unexpected}")
        while expected > report.positions:  # in parts, because a window can be large
            count = min(expected - report.positions, _ROWS_AT_A_TIME)
            report.left_out += count
            self._rows(entry, report.positions, count)
        rows = self._rows(entry, entry.start, entry.count)
        if entry.epoch != entry.start // self._num_rows:
            raise self._wrong(entry, f"position {entry.start} is in epoch {entry.start // self._num_rows}, not in {entry.epoch}")
        if (digest := digest_of_rows(rows)) != entry.digest:
            raise self._wrong(entry, f"the rows of step {step} have the digest {entry.digest}, but the order gives {digest}")
        found = self._targets.count(rows)
        if not found <= entry.targets <= found + self._targets.num_hidden(rows):
            raise self._wrong(entry, f"the line says {entry.targets} targets for step {step}, but its rows have {found}")
        report.steps, report.targets = step, report.targets + entry.targets
        if not entry.applied:
            report.withheld.append(step)
        return rows

    def _event(self, entry: LedgerEvent) -> None:
        facts = entry.model_dump()
        if entry.event == "gap":
            raise CheckpointError(
                f"{self._path}: the ledger was moved away before step {entry.head.step + 1}, so it does not prove the rows of "
                "earlier steps; restore the whole ledger from a copy"
            )
        if entry.head.step != self.report.steps:
            raise self._wrong(entry, f"event {entry.event} after step {entry.head.step}, but the last step is {self.report.steps}")
        if isinstance(entry, OrderEvent):
            self._order = self._build(entry)
            self._passes_N = np.full(self._num_rows if self.report.counted else 0, -1, np.int32)
            self.report.orders.append(facts)
        elif isinstance(entry, SkipEvent):
            start, count = entry.start, entry.count
            if start < self.report.positions:
                raise self._wrong(
                    entry, f"{count} positions from {start} on cannot be left out: {self.report.positions} are already used"
                )
            if count > MAX_LEFT_OUT - sum(window.count for window in self.report.skipped):
                raise self._wrong(entry, f"more than {MAX_LEFT_OUT} positions are left out")
            self.report.skipped.append(Skipped(entry.head.step, start, count, entry.reason))
        else:
            self.report.events.append(facts)
        if isinstance(entry, QuarantineEvent):
            self.report.quarantined += entry.shards
            self._targets.quarantine(entry.shards)

    def _rows(self, entry: LedgerStep | LedgerEvent, start: int, count: int) -> NDArray[np.int64]:
        """Return the rows at the next positions. Check that no row is used again too early."""
        if self._order is None:
            raise self._wrong(entry, "no earlier line gives the order of the rows")
        rows = self._order.rows_at(start, count)
        if self.report.counted:
            passes_B = passes_at(self._order, start, count)
            for number in np.unique(passes_B):  # one number, or two at the end of an epoch
                here = rows[passes_B == number]
                values, counts = np.unique(here, return_counts=True)
                again = np.concatenate((here[self._passes_N[here] >= number], values[counts > 1]))
                if len(again):
                    raise self._wrong(entry, f"row {again[0]} is used again before all other rows were used")
                self._passes_N[here] = number
        self.report.positions += count
        return rows

    def _wrong(self, entry: LedgerStep | LedgerEvent, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}, line {entry.head.lines}: {message}; the ledger does not belong to this run and data")


def next_position(position: int, count: int, windows: Iterable[Skipped]) -> int:
    """Return the first position for `count` rows that touch no window. Not the loader's function, so the audit finds its errors."""
    for window in sorted(windows, key=lambda window: window.start):
        if window.start < position + count and position < window.end:
            position = window.end
    return position


def passes_at(order: RowOrder, start: int, count: int) -> NDArray[np.int32]:
    """Return the completed passes over all rows, or over the rows of the drawn source, before each position, shape (count,)."""
    positions = np.arange(start, start + count, dtype=np.int64)
    if isinstance(order, MixedOrder):
        cycles, places = np.divmod(positions, len(order.source_M))
        sources = order.source_M[places]
        sizes = np.array([source.order.num_rows for source in order.sources], np.int64)
        draws = cycles * order.counts_K[sources] + order.drawn_M[places]
        return (draws // sizes[sources]).astype(np.int32)
    assert isinstance(order, UniformOrder)
    return (positions // order.num_rows).astype(np.int32)


class Targets:
    """Counts targets as the run did, with its quarantine, if the shards can still be read."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._quarantined: set[str] = set()
        self._lost: dict[str, ShardError | OSError] = {}
        self.uncounted = 0

    def quarantine(self, shards: Iterable[str]) -> None:
        self._quarantined |= set(shards)

    def count(self, rows_B: NDArray[np.int64]) -> int:
        """Return the number of targets in these rows. Rows that cannot be read count as none."""
        return int(self._rows.without(self._quarantined | self._lost.keys(), self._note).num_targets(rows_B).sum())

    def num_hidden(self, rows_B: NDArray[np.int64]) -> int:
        """Return the largest number of targets in those of the rows that cannot be read any more."""
        lost = self._rows.num_rows_in(self._lost.keys() - self._quarantined, rows_B)
        self.uncounted += lost
        return lost * (self._rows.row_length - 1)

    def check_excused(self) -> None:
        """Raise the error of a shard that could not be read and that the run has not put into quarantine."""
        for shard, error in self._lost.items():
            if shard not in self._quarantined:
                raise error

    def _note(self, error: ShardError | OSError) -> None:
        shard = self._rows.shard_of(error)
        assert shard is not None
        self._lost[shard] = error


def audit_run(run: Path, data: Path | None = None) -> AuditReport:
    """Audit a run that is finished, stopped or killed. `data` is the new directory of its prepared data, if it was moved."""
    saved_run = SavedRun(run)
    record = saved_run.record
    check_was_trained(run, record)
    with opened_data(saved_run, data) as (directory, manifest, rows):
        states = {}  # place in the ledger and counters of each checkpoint
        for step in saved_run.steps:
            state = saved_run.state(step)
            progress = state.progress
            assert state.ledger is not None
            counters = {"steps": progress.step, "positions": progress.rows, "targets": progress.targets}
            states[step] = state.ledger, counters
        ends = {head.lines: step for step, (head, _) in states.items()}
        build = order_builder(run, directory, manifest, rows)
        targets = Targets(rows)
        auditor = Auditor(run / LEDGER, build, targets, len(rows))
        drawn = np.zeros(len(manifest.sources), np.int64)
        padding = dict.fromkeys(manifest.sources, 0)
        source_of = {shard.path: shard.source for shard in manifest.shards}
        for entry in read_ledger(run / LEDGER):
            used = auditor.follow(entry)
            drawn += np.bincount(rows.source_ids(used), minlength=len(drawn))
            for shard in source_of.keys() & auditor.report.quarantined:
                padding[source_of[shard]] += rows.num_rows_in([shard], used)
            if entry.head.lines in ends:
                step, report = ends.pop(entry.head.lines), auditor.report
                saved = states[step]
                followed = entry.head, {"steps": report.steps, "positions": report.positions, "targets": report.targets}
                if saved != followed or step != report.steps:
                    raise CheckpointError(
                        f"{run / LEDGER}, line {entry.head.lines}: the checkpoint of step {step} has the counters {saved[1]} and "
                        f"the chain {saved[0].chain}, but the ledger has {followed[1]} and {entry.head.chain}; they do not belong "
                        "to the same run"
                    )
        report = auditor.report
        targets.check_excused()
        report.uncounted = targets.uncounted
        for line, step in ends.items():
            raise CheckpointError(
                f"{run / LEDGER}: it ends at line {report.lines}, but the checkpoint of step {step} names line {line}; restore the "
                "file from a copy"
            )
        if record.status != "training" and record.step != report.steps:
            raise CheckpointError(
                f"{run / LEDGER}: it ends at step {report.steps}, but the record says {record.status} at step "
                f"{record.step}; restore both files from a copy"
            )
        report.checkpoints = list(states)
        for name, count, ranges in zip(manifest.sources, drawn.tolist(), rows.source_ranges(), strict=True):
            report.rows[name], report.padding[name] = int((ranges[:, 1] - ranges[:, 0]).sum()), padding[name]
            report.drawn[name] = count - padding[name]
        return report


@contextmanager
def opened_data(run: SavedRun, data: Path | None) -> Iterator[tuple[Path, Manifest, Rows]]:
    """Open the training rows of a run. `prepare` cannot replace their directory inside this context."""
    directory = run.data_folder(data)
    with reading(directory, f"audit of run {run.path.absolute().name}"):
        manifest = read_manifest(directory)
        rows = saved_task(run, run.config).rows
        yield directory, manifest, rows(directory, manifest, "train", verify=True)


def order_builder(run: Path, directory: Path, manifest: Manifest, rows: Rows) -> Callable[[OrderEvent], RowOrder]:
    """Return a function that builds the order of rows from an `order` event, and checks that the event fits the data."""

    def build(event: OrderEvent) -> RowOrder:
        if event.data != manifest.root_digest or event.rows != len(rows):
            raise PreparedDataError(
                f"{run} was trained on the data {event.data} with {event.rows} rows, but {directory} holds "
                f"{manifest.root_digest} with {len(rows)}; name the right folder with --data"
            )
        return build_order(event.seed, rows, manifest.sources, event.mixture)

    return build


def show_step(run: Path, step: int, *, data: Path | None = None, full: bool = False, as_json: bool = False) -> str:
    """Return the text that a step was trained on, by row and document, as the model saw it, and which parts had a loss."""
    with opened_data(SavedRun(run), data) as (directory, manifest, rows):
        build = order_builder(run, directory, manifest, rows)
        order, last = None, 0
        quarantined: set[str] = set()
        for entry in read_ledger(run / LEDGER):
            last = entry.head.step
            if isinstance(entry, OrderEvent):
                order = build(entry)
            elif isinstance(entry, QuarantineEvent):
                quarantined |= set(entry.shards)
            elif isinstance(entry, LedgerStep) and last == step and order is not None:
                numbers = order.rows_at(entry.start, entry.count)
                shown_rows = rows.without(quarantined)
                if (digest := digest_of_rows(numbers)) != entry.digest:
                    raise CheckpointError(
                        f"{run / LEDGER}: the rows of step {step} have the digest {entry.digest}, but the order gives {digest}; "
                        "restore the file from a copy"
                    )
                tokenizer = load_tokenizer(directory / "tokenizer")
                shown = [_row(number, shown_rows, manifest, tokenizer, full=full) for number in numbers.tolist()]
                summary = {"step": step, "start": entry.start, "epoch": entry.epoch, "targets": entry.targets, "rows": shown}
                return json.dumps(summary, ensure_ascii=False) if as_json else _page(summary, directory)
    raise ConfigError(f"--step {step}: the ledger of {run} has the steps 1 to {last}; choose one of these")


def _row(number: int, rows: Rows, manifest: Manifest, tokenizer: Tokenizer, *, full: bool) -> dict[str, Any]:
    place = np.array([number])
    batch = rows.read(place)
    tokens, segments = batch.tokens_BL[0], batch.segments_BL[0]
    has_loss = None if batch.has_loss_BL is None else batch.has_loss_BL[0]
    documents = []
    for index, identity in enumerate(rows.document_ids(number).tolist()):
        is_own = segments == index
        ids = tokens[is_own].tolist()
        document = {"id": identity, "tokens": len(ids), "text": _text(ids, tokenizer, full=full)}
        if has_loss is not None:
            document["parts"] = _parts(ids, has_loss[is_own].tolist(), tokenizer, full=full)
        documents.append(document)
    source = manifest.sources[int(rows.source_ids(place)[0])]
    return {"row": number, "source": source, "padding": int((segments < 0).sum()), "documents": documents}


def _parts(ids: Sequence[int], has_loss: Sequence[bool], tokenizer: Tokenizer, *, full: bool) -> list[dict[str, Any]]:
    parts = []
    for loss, group in groupby(zip(has_loss, ids, strict=True), key=itemgetter(0)):
        own = [token for _, token in group]
        parts.append({"loss": loss, "tokens": len(own), "text": _text(own, tokenizer, full=full)})
    return parts


def _text(ids: Iterable[int], tokenizer: Tokenizer, *, full: bool) -> str:
    """Return the text of ids, with special tokens by role. The text is cut unless `full`."""
    special: list[tuple[str, int | None]] = [(token.name, token.id) for token in tokenizer.named_tokens]
    special += [("⟨unk⟩", tokenizer.unk_id), ("⟨bos⟩", tokenizer.bos_id), ("⟨eos⟩", tokenizer.eos_id)]
    names = {number: name for name, number in special if number is not None}
    groups = ((name, list(group)) for name, group in groupby(ids, names.get))
    text = "".join(tokenizer.decode(group) if name is None else name * len(group) for name, group in groups)
    return text if full or len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _page(summary: Mapping[str, Any], directory: Path) -> str:
    lines = [
        f"step {summary['step']}: {len(summary['rows'])} rows from position {summary['start']} of the order on, epoch "
        f"{summary['epoch']}, {summary['targets']} targets"
    ]
    for row in summary["rows"]:
        lines.append(f"\nrow {row['row']}, source {row['source']}, {row['padding']} tokens of padding")
        for document in row["documents"]:
            lines.append(f"  document {document['id']}, {document['tokens']} tokens")
            for part in document.get("parts") or [document]:
                if "loss" in part:
                    lines.append(f"    {'with' if part['loss'] else 'without'} a loss, {part['tokens']} tokens:")
                lines += [f"    {line}" for line in printable(part["text"]).split("\n")]
    lines.append(f"\nA whole document: trainer inspect {directory} --document ID")
    return "\n".join(lines)
