from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.errors import CheckpointError
from trainer.data.mixture import MixedOrder, SourceOrder, chairman_assignment
from trainer.data.order import RowOrder, UniformOrder
from trainer.runs.ledger import Ledger, LedgerEvent, LedgerStep, OrderEvent, SkipEvent, digest_of_rows, read_ledger
from trainer.runs.state import LedgerHead
from trainer.verification.audit import Auditor, AuditReport, Skipped, Targets, passes_at

ROWS, BATCH, SEED = 21, 4, 7
ORDER = UniformOrder(SEED, ROWS)
PATH = Path("run/ledger/steps.jsonl")

Entry = LedgerStep | LedgerEvent


def targets_of(rows: NDArray[np.int64]) -> int:
    return int((rows + 5).sum())


class AllReadable(Targets):
    """Counts targets without files: every row can be read."""

    def __init__(self) -> None: ...

    def count(self, rows_B: NDArray[np.int64]) -> int:
        return targets_of(rows_B)

    def num_hidden(self, rows_B: NDArray[np.int64]) -> int:
        return 0

    def quarantine(self, shards: Iterable[str]) -> None: ...


def audited(entries: list[Entry], build: Callable[[OrderEvent], RowOrder] = lambda _: ORDER, rows: int = ROWS) -> AuditReport:
    auditor = Auditor(PATH, build, AllReadable(), rows)
    for entry in entries:
        auditor.follow(entry)
    return auditor.report


def history(steps: int, batch: int = BATCH, order: RowOrder = ORDER) -> list[Entry]:
    """What a faultless run would have written."""
    entries: list[Entry] = [OrderEvent(head=LedgerHead(0, 1), event="order", step=0, seed=SEED, data="", rows=ROWS, mixture={})]
    for step in range(1, steps + 1):
        entries.append(claim(step, (step - 1) * batch, batch, order=order))
    return entries


def claim(step: int, start: int, count: int = BATCH, order: RowOrder = ORDER) -> LedgerStep:
    rows = order.rows_at(start, count)
    return LedgerStep(
        head=LedgerHead(step, step + 1),
        step=step,
        start=start,
        count=count,
        epoch=start // ROWS,
        targets=targets_of(rows),
        digest=digest_of_rows(rows),
        applied=True,
    )


def skip(start: int, count: int) -> LedgerEvent:
    return SkipEvent(head=LedgerHead(2, 4), event="skip", step=2, start=start, count=count, reason="loss spike")


def step_of(entries: list[Entry], step: int) -> LedgerStep:
    entry = entries[step]
    assert isinstance(entry, LedgerStep)
    return entry


def mixed(counts: tuple[int, ...], sizes: tuple[int, ...]) -> MixedOrder:
    source_M = chairman_assignment(counts)
    firsts = np.cumsum([0, *sizes])
    sources = tuple(
        SourceOrder(UniformOrder(number, size), np.array([firsts[number]]), np.array([size])) for number, size in enumerate(sizes)
    )
    drawn = np.array([int((source_M[:place] == source_M[place]).sum()) for place in range(len(source_M))], np.int32)
    return MixedOrder(tuple("abc"[: len(sizes)]), sources, (), source_M, drawn, np.array(counts, np.int64))


@settings(max_examples=50)
@given(steps=st.integers(0, 40), batch=st.integers(1, 50))
def test_a_faultless_history_is_proven(steps: int, batch: int) -> None:
    report = audited(history(steps, batch))
    assert (report.steps, report.positions, report.lines) == (steps, steps * batch, steps + 1)
    assert report.targets == sum(targets_of(ORDER.rows_at(step * batch, batch)) for step in range(steps))
    assert "without a gap" in report.describe()


@settings(max_examples=50)
@given(sizes=st.tuples(st.integers(1, 9), st.integers(1, 30)), counts=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_a_faultless_history_of_a_mixture_is_proven(sizes: tuple[int, ...], counts: tuple[int, ...]) -> None:
    order = mixed(counts, sizes)
    entries = [
        entry.model_copy(update={"epoch": entry.start // sum(sizes)}) if isinstance(entry, LedgerStep) else entry
        for entry in history(25, 3, order)
    ]
    assert audited(entries, lambda _: order, sum(sizes)).steps == 25


def test_passes_are_counted_for_each_source() -> None:
    order = mixed((1, 2), (2, 10))
    source = order.source_M[np.arange(12) % 3]
    passes = passes_at(order, 0, 12)
    assert passes[source == 0].tolist() == [0, 0, 1, 1]
    assert passes[source == 1].tolist() == [0] * 8
    assert passes_at(order, 5, 7).tolist() == passes[5:].tolist()


@given(data=st.data())
def test_any_claim_about_a_step_that_is_not_true_is_found(data: st.DataObject) -> None:
    entries = history(12)
    step = data.draw(st.integers(1, 12))
    entry = step_of(entries, step)
    name = data.draw(st.sampled_from(["start", "count", "epoch", "targets", "digest", "step"]))
    if name == "digest":
        entries[step] = entry.model_copy(update={"digest": digest_of_rows(ORDER.rows_at(entry.start, BATCH)[::-1])})
    elif name == "step":
        entries[step] = entry.model_copy(update={"head": replace(entry.head, step=step + data.draw(st.sampled_from([-1, 1])))})
    else:
        value = getattr(entry, name) + data.draw(st.integers(-3, 3).filter(bool))
        entries[step] = entry.model_copy(update={name: value})
    with pytest.raises(CheckpointError, match=f"line {step + 1}: "):
        audited(entries)


@pytest.mark.parametrize(
    ("start", "finding"),
    [(4, "positions 4 to 7 were used again"), (12, "positions 8 to 11 were left out"), (9, "positions 8 to 8 were left")],
)
def test_a_repeat_and_an_omission_are_named(start: int, finding: str) -> None:
    with pytest.raises(CheckpointError, match=f"line 4: step 3 begins at position {start}, so {finding}"):
        audited([*history(2), claim(3, start)])


@pytest.mark.parametrize(("numbers", "line"), [([0, 1, 2, 3, 4, 5, 2, 7], 3), ([0, 1, 2, 2, 4, 5, 6, 7], 2)])
def test_an_order_that_repeats_a_row_is_found(monkeypatch: pytest.MonkeyPatch, numbers: list[int], line: int) -> None:
    """Shows that counting sees what the comparison with the order cannot."""

    class Repeating:
        description = ""

        def rows_at(self, start: int, count: int) -> NDArray[np.int64]:
            return np.array(numbers)[start : start + count]

    monkeypatch.setattr("trainer.verification.audit.passes_at", lambda *_: np.zeros(BATCH, np.int32))
    with pytest.raises(CheckpointError, match=f"line {line}: row 2 is used again before all other rows were used"):
        audited(history(2, order=Repeating()), lambda _: Repeating())


def test_windows_that_were_skipped_are_listed_and_are_no_omission() -> None:
    entries = [*history(2), skip(8, 8), claim(3, 16)]
    report = audited(entries)
    assert report.skipped == [Skipped(2, 8, 8, "loss spike")]
    assert (report.steps, report.positions, report.left_out) == (3, 20, 8)
    assert "8 rows: positions 8 to 15, announced after step 2 (loss spike)" in report.describe()


@pytest.mark.parametrize(
    ("windows", "starts"),
    [
        ([(12, 4)], [8, 16]),  # steps are made before it is reached
        ([(10, 4)], [14, 18]),  # a batch that would touch it begins after it
        ([(12, 4), (8, 4)], [16, 20]),
        ([(8, 6), (10, 8)], [18, 22]),
        ([(400, 4)], [8, 12]),
    ],
)
def test_a_window_is_passed_over_where_a_batch_would_touch_it(windows: list[tuple[int, int]], starts: list[int]) -> None:
    before = [*history(2), *(skip(start, count) for start, count in windows)]
    report = audited([*before, *(claim(step, start) for step, start in enumerate(starts, 3))])
    assert report.positions == starts[-1] + BATCH
    assert report.left_out == starts[-1] - 12
    for wrong in (starts[0] - 1, starts[0] + 1):
        with pytest.raises(CheckpointError, match=f"step 3 begins at position {wrong}"):
            audited([*before, claim(3, wrong)])


def test_a_window_of_used_positions_cannot_be_skipped() -> None:
    with pytest.raises(CheckpointError, match="line 4: 8 positions from 4 on cannot be left out"):
        audited([*history(2), skip(4, 8)])


def test_updates_that_were_withheld_and_other_events_are_listed() -> None:
    entries = history(3)
    entries[2] = step_of(entries, 2).model_copy(update={"applied": False})
    report = audited([*entries, LedgerEvent(head=LedgerHead(3, 5), event="micro_batch", step=3, micro=2)])
    assert report.withheld == [2]
    assert report.events == [{"event": "micro_batch", "step": 3, "micro": 2}]
    assert "micro_batch after step 3" in report.describe()


def test_an_event_of_another_step_is_refused() -> None:
    with pytest.raises(CheckpointError, match="line 4: event micro_batch after step 1, but the last step is 2"):
        audited([*history(2), LedgerEvent(head=LedgerHead(1, 4), event="micro_batch", step=1)])


def test_a_step_before_any_order_is_refused() -> None:
    with pytest.raises(CheckpointError, match="line 2: no earlier line gives the order of the rows"):
        audited(history(1)[1:])


def test_another_order_begins_a_new_count() -> None:
    other = UniformOrder(SEED + 1, ROWS)
    change = OrderEvent(head=LedgerHead(2, 4), event="order", step=2, seed=SEED + 1, data="", rows=ROWS, mixture={})
    report = audited([*history(2), change, claim(3, 8, order=other)], lambda event: UniformOrder(event.seed, ROWS))
    assert [order["step"] for order in report.orders] == [0, 2]
    assert "a new order from step 3 on" in report.describe()


def test_a_ledger_that_was_moved_away_proves_nothing(tmp_path: Path) -> None:
    def write(resumed: LedgerHead | None, first: int, last: int) -> LedgerHead:
        ledger = Ledger(tmp_path / "steps.jsonl", resumed)
        ledger.order(step=first - 1, seed=SEED, data="", rows=ROWS, mixture={})
        for step in range(first, last + 1):
            rows = ORDER.rows_at((step - 1) * BATCH, BATCH)
            ledger.commit(step=step, start=(step - 1) * BATCH, rows=rows, targets=targets_of(rows))
        ledger.close()
        return ledger.head

    head = write(None, 1, 3)
    assert audited(list(read_ledger(tmp_path / "steps.jsonl"))).steps == 3
    (tmp_path / "steps.jsonl").unlink()
    write(head, 4, 6)
    with pytest.raises(CheckpointError, match="moved away before step 4"):
        audited(list(read_ledger(tmp_path / "steps.jsonl")))


def test_more_rows_than_can_be_counted_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.verification.audit.MAX_COUNTED_ROWS", ROWS - 1)
    report = audited(history(3))
    assert not report.counted
    assert "too many rows to count each of them" in report.describe()
