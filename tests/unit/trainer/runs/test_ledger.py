import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import CheckpointError
from trainer.data.order import rows_at
from trainer.runs.ledger import Ledger, LedgerEvent, LedgerStep, OrderEvent, SkipEvent, digest_of_rows, read_ledger
from trainer.runs.state import LedgerHead

ROWS, BATCH, SEED = 61, 8, 7


def begin(path: Path, resumed: LedgerHead | None = None) -> Ledger:
    ledger = Ledger(path, resumed)
    ledger.order(step=0 if resumed is None else resumed.step, seed=SEED, data="sha256:00", rows=ROWS, mixture={})
    return ledger


def write_steps(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        start = (step - 1) * BATCH
        ledger.commit(step=step, start=start, rows=rows_at(SEED, start, BATCH, ROWS), targets=100 + step)


def write_ledger(path: Path, last: int) -> LedgerHead:
    ledger = begin(path)
    write_steps(ledger, 1, last)
    ledger.sync()
    ledger.close()
    return ledger.head


def is_whole(path: Path, head: LedgerHead) -> bool:
    """Whether the ledger is undamaged and ends where it should, which is what an audit asks."""
    try:
        *_, last = read_ledger(path)
    except (CheckpointError, ValueError):
        return False
    return last.head == head


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, LedgerHead]:
    path = tmp_path_factory.mktemp("ledger") / "steps.jsonl"
    head = write_ledger(path, 5)
    return path, path.read_bytes(), head


def test_every_step_is_read_back_as_it_was_committed(tmp_path: Path) -> None:
    head = write_ledger(tmp_path / "steps.jsonl", 9)
    order, *steps = read_ledger(tmp_path / "steps.jsonl")
    assert isinstance(order, OrderEvent)
    assert (order.event, order.seed, order.rows) == ("order", SEED, ROWS)
    assert all(isinstance(step, LedgerStep) for step in steps)
    assert [step.head.step for step in steps] == list(range(1, 10))
    assert steps[-1].head == head
    last = steps[-1]
    assert isinstance(last, LedgerStep)
    assert (last.start, last.count, last.epoch, last.targets, last.applied) == (64, 8, 1, 109, True)
    assert last.digest == digest_of_rows(rows_at(SEED, 64, 8, ROWS))


def test_the_file_is_json_by_line(written: tuple[Path, bytes, LedgerHead]) -> None:
    assert [json.loads(line).get("step") for line in written[1].splitlines()] == [0, 1, 2, 3, 4, 5]


def test_the_digest_depends_on_the_rows_and_their_order() -> None:
    first = digest_of_rows(np.array([1, 2, 3]))
    assert first == digest_of_rows(np.array([1, 2, 3]))
    assert (
        len({first, digest_of_rows(np.array([2, 1, 3])), digest_of_rows(np.array([1, 2, 4])), digest_of_rows(np.array([1, 2]))})
        == 4
    )


@settings(max_examples=300)
@given(data=st.data())
def test_any_changed_byte_is_found(written: tuple[Path, bytes, LedgerHead], data: st.DataObject) -> None:
    path, content, head = written
    place = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(1, 255))
    path.write_bytes(content[:place] + bytes([content[place] ^ other]) + content[place + 1 :])
    with pytest.raises(CheckpointError, match="line"):
        list(read_ledger(path))
    path.write_bytes(content)
    assert is_whole(path, head)


@given(data=st.data())
def test_any_dropped_doubled_or_swapped_line_is_found(written: tuple[Path, bytes, LedgerHead], data: st.DataObject) -> None:
    path, content, head = written
    lines = content.splitlines(keepends=True)
    first = data.draw(st.integers(0, len(lines) - 1))
    second = data.draw(st.integers(0, len(lines) - 1).filter(lambda place: place != first))
    dropped, doubled, swapped = list(lines), list(lines), list(lines)
    del dropped[first]
    doubled.insert(first, lines[second])
    swapped[first], swapped[second] = lines[second], lines[first]
    for changed in (dropped, doubled, swapped):
        path.write_bytes(b"".join(changed))
        assert not is_whole(path, head)


@given(data=st.data())
def test_a_torn_last_line_is_left_out(written: tuple[Path, bytes, LedgerHead], data: st.DataObject) -> None:
    path, content, _ = written
    cut = data.draw(st.integers(1, len(content.splitlines(keepends=True)[-1]) - 1))
    path.write_bytes(content[:-cut])
    assert [entry.head.step for entry in read_ledger(path)] == [0, 1, 2, 3, 4]


def test_a_missing_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"steps\.jsonl: missing"):
        list(read_ledger(tmp_path / "steps.jsonl"))


@settings(max_examples=30)
@given(stops=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=4))
def test_a_run_stopped_and_killed_anywhere_leaves_the_bytes_of_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, stops: list[tuple[int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("resumed")
    write_ledger(directory / "whole.jsonl", 12)
    path, saved = directory / "steps.jsonl", None
    for save_at, beyond in sorted(stops):
        ledger = begin(path, saved)
        done = 0 if saved is None else saved.step
        if save_at >= done:
            write_steps(ledger, done + 1, save_at)
            ledger.sync()
            saved = ledger.head
            write_steps(ledger, save_at + 1, save_at + beyond)  # lost: no checkpoint names them
        ledger.close()
        with path.open("ab") as file:
            file.write(b'{"step":99,"st')
    ledger = begin(path, saved)
    write_steps(ledger, (0 if saved is None else saved.step) + 1, 12)
    ledger.close()
    assert path.read_bytes() == (directory / "whole.jsonl").read_bytes()


def test_a_history_that_was_changed_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    head = write_ledger(path, 3)
    write_ledger(tmp_path / "other.jsonl", 4)
    path.write_bytes(path.read_bytes().replace(b'"targets":102', b'"targets":103'))
    with pytest.raises(CheckpointError, match="line 3"):
        Ledger(path, head)
    lines = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(CheckpointError, match="line 4 is not the one that the checkpoint of step 3 names"):
        Ledger(path, head)


def test_a_ledger_that_was_moved_away_begins_with_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    head = write_ledger(path, 3)
    path.unlink()
    ledger = begin(path, head)
    ledger.close()
    gap, order = read_ledger(path)
    assert isinstance(gap, LedgerEvent)
    assert isinstance(order, OrderEvent)
    assert (gap.event, gap.head.step, order.event, order.head.step) == ("gap", 3, "order", 3)


def test_rewinding_gives_up_what_came_after_and_keeps_the_order(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    ledger = begin(path)
    write_steps(ledger, 1, 2)
    saved = ledger.head
    write_steps(ledger, 3, 5)
    ledger.rewind(saved)
    ledger.event("skip", step=2, start=16, count=8, reason="loss spike")
    ledger.order(step=2, seed=SEED, data="sha256:00", rows=ROWS, mixture={})
    ledger.commit(step=3, start=24, rows=rows_at(SEED, 24, BATCH, ROWS), targets=1, applied=False)
    ledger.close()
    *_, skip, step = read_ledger(path)
    assert isinstance(skip, SkipEvent)
    assert isinstance(step, LedgerStep)
    assert (skip.start, skip.count, skip.reason) == (16, 8, "loss spike")
    assert (step.head.step, step.head.lines, step.applied) == (3, 5, False)


def test_another_order_is_noted_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    ledger = begin(path)
    write_steps(ledger, 1, 1)
    for weights in ({"a": 1.0}, {"a": 1.0}, {"a": 2.0}):
        ledger.order(step=1, seed=SEED, data="sha256:00", rows=ROWS, mixture=weights)
    ledger.close()
    orders = [entry for entry in read_ledger(path) if isinstance(entry, OrderEvent)]
    assert [order.mixture for order in orders] == [{}, {"a": 1.0}, {"a": 2.0}]


def test_a_head_survives_json() -> None:
    head = LedgerHead(3, 4, "ab")
    assert LedgerHead(**json.loads(json.dumps(head.to_json()))) == head
