"""Records of the fault campaigns. Each test records the faults that it injected, and a table is made of these records.

A test of `tests/faults` or `tests/containers` is marked with the row of the table that it is evidence for, as
`@pytest.mark.claim(row, fault)` or `@pytest.mark.broken(row, variant)`. While the test runs, `tried`, `noted`, `counted` and
`measured` add to its tally. When the test ends, its outcome is written as a `Record`.
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

RECORDS = "FAULTS_RECORDS"
"""Name of the environment variable with the folder for the records. If it is not set, nothing is written."""


@dataclass
class Tally:
    """Counts and remarks that one test has collected so far."""

    tried: int = 0
    """Number of injected faults."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the table."""
    sums: dict[str, float] = field(default_factory=dict)
    """Numbers that the table adds up over the parts of a campaign, by label."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Largest value of each measured number, by label."""


@dataclass(frozen=True)
class Record:
    """The outcome of one test."""

    test: str
    """Name of the test, with its parameters."""
    row: str
    fault: str
    """The fault that was injected, or the variant that was broken."""
    broken: bool
    """True if the test shows that a broken variant is noticed."""
    tried: int
    unit: str
    """The unit in which the faults are counted."""
    every: bool
    """True if all existing cases were tried. Then there is no failure rate to bound."""
    failed: bool
    seconds: float
    notes: tuple[str, ...]
    sums: dict[str, float]
    peaks: dict[str, float]
    full: bool
    """True if the test ran with the counts of the full campaign."""
    date: str
    machine: str


_open: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def opened_tally() -> Iterator[Tally]:
    """Collect what the test in this block tries, notes, counts and measures."""
    tally = Tally()
    token = _open.set(tally)
    try:
        yield tally
    finally:
        _open.reset(token)


def tried(number: int = 1) -> None:
    """Add `number` injected faults to the tally of the running test."""
    if tally := _open.get():
        tally.tried += number


def noted(text: str) -> None:
    """Add a remark to the row of the running test, and print it."""
    print(text)
    if tally := _open.get():
        tally.notes.append(text)


def counted(what: str, number: float) -> None:
    """Add `number` to a sum of the running test, such as "runs". The table adds it up over the parts of a campaign."""
    if tally := _open.get():
        tally.sums[what] = tally.sums.get(what, 0) + number


def measured(what: str, number: float) -> None:
    """Record a measured number of the running test, such as "s until all had ended". The table shows the largest one."""
    if tally := _open.get():
        tally.peaks[what] = max(tally.peaks.get(what, number), number)


def caught(found: int, number: int) -> None:
    """Note in how many of `number` trials a broken variant was noticed. Fails if `found` is 0."""
    noted(f"{found:,} of {number:,}")
    assert found


def machine(folder: Path) -> str:
    """Return the number of cores, the versions and the file system of these tests as text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, Python {platform.python_version()}, torch {torch.__version__}, {_file_system(folder)}"


def today() -> str:
    """Return today's date in UTC, in ISO format."""
    return datetime.now(UTC).date().isoformat()


def write_record(folder: Path, record: Record) -> None:
    """Write a record to a file named after its row and test. Overwrites an older record of the same row and test."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{record.row}-{record.test}")[-200:]
    (folder / f"{name}.json").write_text(json.dumps(asdict(record), ensure_ascii=False))


def read_records(folder: Path) -> list[Record]:
    """Return all records of a folder, sorted by file name."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [Record(**values | {"notes": tuple(values["notes"])}) for values in found]


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder: the mount with the longest path above the folder."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return platform.system()
    above = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(above, default=(0, "unknown file system"))[1]
