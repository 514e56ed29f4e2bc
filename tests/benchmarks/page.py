"""The page that shows the figures of all benchmarks."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs import ROOT

DOCS = ROOT / "docs" / "benchmarks.md"


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two lines of a page."""
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no line {begin} with a line {end} below it; add both where the table belongs")
    page.write_text(f"{before}{begin}\n{text}{end}{after}")
