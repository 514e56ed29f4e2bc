"""The tables of docs/faults.md match the records, and rows that were not run again do not change."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.table import DOCUMENT, HEADER, USUAL_MACHINE, lines_by_row, main, updated
from tests.support.claims import Record, caught, counted, measured, noted, opened_tally, read_records, tried, write_record
from tests.support.faults import seeds, turns

ONE = Record(
    test="test_it[a]",
    row="5",
    fault="truncation",
    broken=False,
    tried=900,
    unit="files",
    every=False,
    failed=False,
    seconds=12.4,
    notes=(),
    sums={},
    peaks={},
    full=True,
    date="2026-11-22",
    machine="2 cores, ext4",
)
FLAW = replace(ONE, test="test_flaw", fault="no digests", broken=True, notes=("21 of 60",))
DOCUMENT_BEFORE = f"""Prose before.
<!-- rows 4 5 6 -->
{HEADER[0]}
{HEADER[1]}
| 4 | power loss | 10 | 0 | none | 2026-11-01 |
| 6 | zero tail | 10 | 0 | none | 2026-11-01 |
<!-- end of rows -->
Prose after.
"""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_row_has_the_sum_of_its_tests_and_the_variants() -> None:
    lines = lines_by_row([ONE, replace(ONE, test="test_it[b]", tried=100, seconds=0.2, notes=("2 set aside",)), FLAW])
    assert cells(lines["5"]) == [
        *("5", "truncation", "1,000 files", "0; 2 set aside", "no digests (21 of 60)"),
        "2026-11-22, 2 cores, ext4",
    ]
    [usual] = lines_by_row([replace(ONE, machine=USUAL_MACHINE)]).values()
    assert cells(usual)[-1] == "2026-11-22"


def test_of_many_variants_the_row_has_the_number_unless_one_was_not_caught() -> None:
    many = [replace(FLAW, fault=f"without {number}") for number in range(9)]
    assert cells(lines_by_row([ONE, *many])["5"])[4] == "9 variants, such as: without 0 (21 of 60)"
    missed = cells(lines_by_row([ONE, *many, replace(FLAW, failed=True)])["5"])[4]
    assert "**no digests: not caught**" in missed


def test_parts_of_a_campaign_add_up_what_they_counted_and_show_the_greatest_of_what_they_measured() -> None:
    parts = [
        replace(ONE, sums={"runs": 30, "minutes": 1200.5}, peaks={"s": 8.25, "steps": 12345}),
        replace(ONE, sums={"runs": 5}, peaks={"s": 18.4}),
    ]
    assert (
        cells(lines_by_row([*parts, replace(ONE, peaks={"s": 2})])["5"])[3]
        == "0; 35 runs; 1,200.5 minutes; at most 18.4 s; at most 12,345 steps"
    )


def test_a_failure_is_shown() -> None:
    line = lines_by_row([replace(ONE, failed=True), replace(FLAW, failed=True)])["5"]
    assert cells(line)[3:5] == ["**1 or more**", "**no digests: not caught**"]


def test_what_was_tried_in_every_case_is_marked_and_units_are_counted_apart() -> None:
    pairs, files = replace(ONE, every=True, tried=7, unit="pairs"), replace(ONE, every=True, tried=3)
    line = lines_by_row([pairs, files])
    assert cells(line["5"])[2:4] == ["7 pairs, 3 files (all cases)", "0"]


def test_samples_and_variants_alone_make_no_row() -> None:
    assert lines_by_row([replace(ONE, full=False), FLAW]) == {}


def test_rows_that_were_run_are_replaced_or_added_in_their_place_and_all_else_stays() -> None:
    changed = updated(DOCUMENT_BEFORE, {"5": "| 5 | new |", "6": "| 6 | newer |"})
    assert changed.splitlines()[4:7] == [DOCUMENT_BEFORE.splitlines()[4], "| 5 | new |", "| 6 | newer |"]
    assert updated(DOCUMENT_BEFORE, {}) == DOCUMENT_BEFORE
    assert updated(changed, {}) == changed


def test_a_row_that_no_table_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="no table lists the rows 7"):
        updated(DOCUMENT_BEFORE, {"7": "| 7 | new |"})


def test_records_are_written_read_and_made_into_the_document(tmp_path: Path) -> None:
    document = tmp_path / "faults.md"
    document.write_text(DOCUMENT_BEFORE)
    for record in (ONE, FLAW, replace(ONE, tried=1000)):
        write_record(tmp_path / "records", record)
    assert sorted(read_records(tmp_path / "records"), key=lambda record: record.broken) == [replace(ONE, tried=1000), FLAW]
    main(tmp_path / "records", document)
    assert "| 5 | truncation | 1,000 files |" in document.read_text()


def test_what_a_test_tries_is_counted_while_it_runs_and_a_variant_that_is_never_noticed_fails() -> None:
    with opened_tally() as tally:
        assert len(list(seeds(3, 3))) == 3
        tried(2)
        noted("slowest 2 s")
        for seconds in (-3, 4.5, 1):
            counted("runs", 2)
            measured("s", seconds)
        caught(1, 60)
        with pytest.raises(AssertionError):
            caught(0, 60)
    assert (tally.tried, tally.notes) == (5, ["slowest 2 s", "1 of 60", "0 of 60"])
    assert (tally.sums, tally.peaks) == ({"runs": 6}, {"s": 4.5})
    tried()
    assert tally.tried == 5


def test_the_tables_of_the_document_are_in_the_form_that_is_written() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert updated(text, {}) == text
    assert f"ran on {USUAL_MACHINE}" in text
    tables = re.findall(r"<!-- rows (.*?) -->\n(.*?)<!-- end of rows -->", text, re.DOTALL)
    assert len(tables) >= 3
    for numbers, table in tables:
        rows = table.splitlines()[2:]
        assert all(len(cells(row)) == len(cells(HEADER[0])) for row in rows)
        assert {cells(row)[0] for row in rows} <= set(numbers.split())


def test_every_test_that_the_document_names_exists() -> None:
    files = {str(path.relative_to(DOCUMENT.parents[1])) for path in (DOCUMENT.parents[1] / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`((?:\w+/)*test_\w+\.py)`", DOCUMENT.read_text(encoding="utf-8")))
    assert len(named) > 30
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} == set()


@pytest.mark.parametrize(("full", "share", "expected"), [("", "4", 3), ("full", None, 50), ("full", "4", 13)])
def test_what_is_drawn_at_random_can_be_run_in_parts(
    monkeypatch: pytest.MonkeyPatch, full: str, share: str | None, expected: int
) -> None:
    monkeypatch.setenv("FAULTS", full)
    monkeypatch.delenv("FAULTS_SHARE", raising=False)
    if share:
        monkeypatch.setenv("FAULTS_SHARE", share)
    assert turns(3, 50) == expected
    monkeypatch.setenv("FAULTS_SEED", "70")
    assert list(seeds(3, 50)) == list(range(70, 70 + expected))
