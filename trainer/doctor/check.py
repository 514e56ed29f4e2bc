"""The result of one check of the machine, and its form as a table or as JSON.

This module and those of the checks that `make doctor` runs on a host import the standard library and `common` alone.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

from common.errors import ConfigError
from common.terminal import PrintableStream, printable
from common.terminal_lines import Colour, bar_columns, coloured

__all__ = ["Check", "Severity", "refuse_errors", "table_lines", "to_json", "write_checks"]

_NAME_COLUMNS, _MARK_COLUMNS, _LEAST_COLUMNS = 18, 9, 50


class Severity(IntEnum):
    """How much a finding hinders a training."""

    OK = 0
    NOTE = 1
    """A fact that may explain a slow training."""
    WARNING = 2
    """Training works, but slower or with a risk."""
    ERROR = 3
    """Training cannot work."""


_COLOURS: dict[Severity, Colour] = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}


@dataclass(frozen=True)
class Check:
    """One row: a fact about the machine, compared with what a training needs."""

    name: str
    found: str
    severity: Severity = Severity.OK
    needed: str = ""
    remedy: str = ""
    """What to do. Every warning and every error has one."""

    def to_json(self) -> dict[str, str]:
        """Return the fields by name."""
        return {
            "name": self.name,
            "severity": self.severity.name.lower(),
            "found": self.found,
            "needed": self.needed,
            "remedy": self.remedy,
        }


def to_json(checks: Sequence[Check]) -> str:
    """Return all rows as one JSON object. `ready` is false if one of them is an error."""
    ready = all(check.severity < Severity.ERROR for check in checks)
    return json.dumps({"ready": ready, "checks": [check.to_json() for check in checks]}, ensure_ascii=False, indent=2)


def table_lines(checks: Iterable[Check], columns: int, paint: Callable[[str, Severity], str] = lambda text, _: text) -> list[str]:
    """Return the rows as lines of at most `columns` characters. Rows that are not `ok` also have `needed` and `remedy`.

    Args:
        checks: the rows.
        columns: width of the terminal.
        paint: colours the word of a severity.
    """
    indent = " " * (_MARK_COLUMNS + _NAME_COLUMNS)
    width = max(_LEAST_COLUMNS, columns) - len(indent)
    lines = [f"{'':{_MARK_COLUMNS}}{'check':{_NAME_COLUMNS}}found"]
    for check in checks:
        mark = paint(f"{check.severity.name.lower():{_MARK_COLUMNS}}", check.severity)
        parts = [check.found]
        if check.severity > Severity.OK:
            parts += [f"{label}: {text}" for label, text in (("needed", check.needed), ("remedy", check.remedy)) if text]
        wrapped = [line for part in parts for line in _wrapped(part, width)]
        lines.append(f"{mark}{check.name:{_NAME_COLUMNS - 1}} {wrapped[0]}")
        lines += [f"{indent}{line}" for line in wrapped[1:]]
    return lines


def write_checks(checks: Sequence[Check], stream: IO[str], *, as_json: bool) -> None:
    """Write the rows to a stream: a table, or one JSON object."""
    if as_json:
        stream.write(f"{to_json(checks)}\n")
        return

    def paint(text: str, severity: Severity) -> str:
        return coloured(text, _COLOURS.get(severity), stream)

    columns = bar_columns(stream) if stream.isatty() else 80
    painted = stream.behind if isinstance(stream, PrintableStream) else stream  # the lines are printable, except for the colours
    painted.write("\n".join(table_lines(checks, columns, paint)) + "\n")


def refuse_errors(checks: Iterable[Check]) -> None:
    """Raise an error that names the rows with the severity `error`, if there are any.

    Raises:
        ConfigError: there is one.
    """
    failed = [check.name for check in checks if check.severity is Severity.ERROR]
    if failed:
        raise ConfigError(f"this machine cannot train yet: {', '.join(failed)}; the remedy is below each of these rows")


def _wrapped(text: str, width: int) -> list[str]:
    """Return text in lines of at most `width` characters; a path that is longer is cut into pieces."""
    text = printable(" ".join(text.split()))
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
