"""What the fault campaigns have shown: each test writes down what it tried, and a table is made of that.

A test of `tests/faults` or `tests/containers` is marked with the row that it is evidence for, `@pytest.mark.claim(row, fault)` or
`@pytest.mark.broken(row, variant)`. While it runs, `tried`, `noted`, `counted` and `measured` add to its tally; its end is
written as a `Record`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

__all__ = [
    "RECORDS",
    "Record",
    "Tally",
    "caught",
    "counted",
    "machine",
    "measured",
    "noted",
    "opened_tally",
    "read_records",
    "today",
    "tried",
    "write_record",
]

RECORDS = "FAULTS_RECORDS"
"""The variable that names the folder for the records; without it nothing is written."""


@dataclass
class Tally:
    """What one test has tried so far."""

    tried: int = 0
    """Faults injected."""
    notes: list[str] = field(default_factory=list)
    """What else is worth a place in the table."""
    sums: dict[str, float] = field(default_factory=dict)
    """Numbers that add up over the parts of a campaign, by what they count."""
    peaks: dict[str, float] = field(default_factory=dict)
    """The greatest of the numbers seen, by what they measure."""


@dataclass(frozen=True)
class Record:
    """The outcome of one test."""

    test: str
    """Its name, with its parameters."""
    row: str
    fault: str
    """What was injected; for a broken variant, what was broken."""
    broken: bool
    """The test shows that a broken variant is caught."""
    tried: int
    unit: str
    """What is counted."""
    every: bool
    """All cases that there are were tried, so there is no rate to bound."""
    failed: bool
    seconds: float
    notes: tuple[str, ...]
    sums: dict[str, float]
    peaks: dict[str, float]
    full: bool
    """With the counts of the full campaign."""
    date: str
    machine: str


_open: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def opened_tally() -> Iterator[Tally]:
    """Collects what the test inside tries, notes, counts and measures."""
    tally = Tally()
    token = _open.set(tally)
    try:
        yield tally
    finally:
        _open.reset(token)


def tried(number: int = 1) -> None:
    """Counts so many injected faults for the test that runs."""
    if tally := _open.get():
        tally.tried += number


def noted(text: str) -> None:
    """Adds a remark to the row of the test that runs, and prints it."""
    print(text)
    if tally := _open.get():
        tally.notes.append(text)


def counted(what: str, number: float) -> None:
    """Adds to a number of the test that runs, such as "runs", which the table adds up over the parts of a campaign."""
    if tally := _open.get():
        tally.sums[what] = tally.sums.get(what, 0) + number


def measured(what: str, number: float) -> None:
    """Tells the test that runs a number, such as "s until all had ended", of which the table shows the greatest."""
    if tally := _open.get():
        tally.peaks[what] = max(tally.peaks.get(what, number), number)


def caught(found: int, number: int) -> None:
    """Notes in how many of the trials a broken variant was noticed; fails where it never was."""
    noted(f"{found:,} of {number:,}")
    assert found


def machine(folder: Path) -> str:
    """The cores, versions and file system of these tests, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, Python {platform.python_version()}, torch {torch.__version__}, {_file_system(folder)}"


def today() -> str:
    """The date, in UTC."""
    return datetime.now(UTC).date().isoformat()


def write_record(folder: Path, record: Record) -> None:
    """Writes a record under the name of its test and row; a later one of the same takes its place."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{record.row}-{record.test}")[-200:]
    (folder / f"{name}.json").write_text(json.dumps(asdict(record), ensure_ascii=False))


def read_records(folder: Path) -> list[Record]:
    """All records of a folder, in the order of their names."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [Record(**values | {"notes": tuple(values["notes"])}) for values in found]


def _file_system(folder: Path) -> str:
    """The kind of the mount with the longest name above a folder, as Linux lists them."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return platform.system()
    above = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(above, default=(0, "unknown file system"))[1]
