"""`record.json` of a run as a dictionary, for tests about its format and tests that damage it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.files import sealed, unsealed


def record_of(run: Path) -> dict[str, Any]:
    return unsealed((run / "record.json").read_bytes())


def rewrite_record(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record and seal it again, as an attacker would who wants to hide the change."""
    record = record_of(run)
    change(record)
    (run / "record.json").write_bytes(sealed(record))
