"""Makes the tables of docs/faults.md from the records of a full campaign.

`python -m tests.faults.table FOLDER` replaces the lines of the rows that FOLDER has records of, and no others.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.claims import Record, read_records

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
HEADER = (
    "| # | fault | n | failures | broken variants, all caught | run |",
    "|---|---|---|---|---|---|",
)
USUAL_MACHINE = "2 cores, Python 3.11.7, torch 2.13.0+cpu, ext4"
"""The machine of a row that names none, as the page says."""
_MOST_VARIANTS = 8
_TABLE = re.compile(r"(<!-- rows (?P<rows>[^>]*) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def lines_by_row(records: Iterable[Record]) -> dict[str, str]:
    """Return one table line for each row with a claim. Records of samples are left out, because they would overstate the result."""
    by_row: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.full:
            by_row[record.row].append(record)
    return {row: _line(row, found) for row, found in by_row.items() if any(not record.broken for record in found)}


def updated(document: str, lines: Mapping[str, str]) -> str:
    """Return the document with these lines in the tables that list their rows. Other lines do not change.

    Raises:
        ValueError: no table of the document lists a row.
    """
    placed: set[str] = set()

    def with_rows(table: re.Match[str]) -> str:
        numbers = table["rows"].split()
        old = {line.split("|")[1].strip(): line for line in table[0].splitlines() if line.startswith("|")}
        placed.update(numbers)
        kept = [lines.get(number) or old.get(number) for number in numbers]
        return "\n".join([table[1].rstrip("\n"), *HEADER, *filter(None, kept), table[3]])

    changed = _TABLE.sub(with_rows, document)
    if unknown := lines.keys() - placed:
        raise ValueError(f"no table lists the rows {', '.join(sorted(unknown))}; add them to one of the lines `<!-- rows … -->`")
    return changed


def main(folder: Path, document: Path = DOCUMENT) -> None:
    """Rewrite the tables, and print which rows were written."""
    lines = lines_by_row(read_records(folder))
    document.write_text(updated(document.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(f"{document}: rows {', '.join(lines) or '- none, because no record is from a full campaign -'}")


def _line(row: str, records: list[Record]) -> str:
    claims = [record for record in records if not record.broken]
    num_failed = sum(record.failed for record in claims)
    cells = (
        row,
        "; ".join(dict.fromkeys(record.fault for record in claims)),
        _counts(claims),
        "; ".join([f"**{num_failed} or more**" if num_failed else "0", *_remarks(claims)]),
        _variants([record for record in records if record.broken]),
        _run(claims),
    )
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


def _counts(claims: list[Record]) -> str:
    """Return the number of injected faults by unit, and whether they were all cases or a sample."""
    numbers: dict[str, int] = defaultdict(int)
    for record in claims:
        numbers[record.unit] += record.tried
    counts = ", ".join(f"{number:,} {unit}".rstrip() for unit, number in numbers.items())
    return f"{counts} (all cases)" if all(record.every for record in claims) else counts


def _remarks(claims: list[Record]) -> Iterator[str]:
    """Yield the notes, the sums of counted numbers, and the largest measured numbers."""
    sums: dict[str, float] = defaultdict(float)
    peaks: dict[str, float] = {}
    for record in claims:
        yield from record.notes
        for what, number in record.sums.items():
            sums[what] += number
        for what, number in record.peaks.items():
            peaks[what] = max(peaks.get(what, number), number)
    yield from (f"{_in_words(number)} {what}" for what, number in sums.items())
    yield from (f"at most {_in_words(number)} {what}" for what, number in peaks.items())


def _in_words(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")


def _run(claims: list[Record]) -> str:
    """Return the last date, and the machine unless it is the usual one."""
    date, machine = max((record.date, record.machine) for record in claims)
    return date if machine == USUAL_MACHINE else f"{date}, {machine}"


def _variants(broken: list[Record]) -> str:
    """Return the broken variants. Of many that were all caught, return their number and an example."""
    if len(broken) > _MOST_VARIANTS and not any(record.failed for record in broken):
        return f"{len(broken)} variants, such as: {_variant(broken[0])}"
    return "; ".join(map(_variant, broken)) or "none"


def _variant(record: Record) -> str:
    if record.failed:
        return f"**{record.fault}: not caught**"
    return f"{record.fault} ({', '.join(record.notes)})" if record.notes else record.fault


if __name__ == "__main__":
    main(Path(sys.argv[1]))
