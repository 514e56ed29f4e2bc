"""The checks of the doctor: their registration, the result of one, and the results as a table or as JSON.

A check is a function with the decorator `check`, in the module of its group. Its parameters are names of facts, which
`trainer.doctor.host` and `trainer.doctor.machine` give to the checks of their place.

This module and those of the checks that `make doctor` runs on a host import the standard library and `common` alone.
"""

from __future__ import annotations

import inspect
import json
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import IO, Any, Literal, TypeVar

from common.errors import ConfigError
from common.terminal import Colour, PrintableStream, bar_columns, coloured, printable

Place = Literal["host", "machine"]
"""`host`: that of the containers, with the standard library alone (`make doctor`). `machine`: where the training runs."""
Group = Literal["engine", "GPUs", "containers", "limits", "all-reduce", "network", "settings", "folders", "versions"]
"""In the order of the rows."""
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., "Check | Iterable[Check]"])

_NAME_COLUMNS, _MARK_COLUMNS, _LEAST_COLUMNS = 18, 9, 50


class Severity(IntEnum):
    OK = 0
    NOTE = 1  # a fact that may explain a slow training
    WARNING = 2  # training works, but slower or with a risk
    ERROR = 3  # training cannot work


_COLOURS: dict[Severity, Colour] = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}


@dataclass(frozen=True)
class Check:
    name: str
    found: str
    severity: Severity = Severity.OK
    needed: str = ""
    remedy: str = ""  # What to do. Every warning and every error has one.


@dataclass(frozen=True)
class _Registered:
    function: Callable[..., Check | Iterable[Check]]
    group: Group
    places: tuple[Place, ...]
    is_slow: bool


_REGISTERED: list[_Registered] = []


def check(group: Group, *places: Place, is_slow: bool = False) -> Callable[[_FunctionT], _FunctionT]:
    """Register a function that returns rows. A slow one is left out of the fast doctor."""

    def register(function: _FunctionT) -> _FunctionT:
        _REGISTERED.append(_Registered(function, group, places, is_slow))
        return function

    return register


def rows_of(place: Place, facts: Mapping[str, Any], *, fast: bool) -> list[Check]:
    """Return the rows of all checks that hold at a place, by group. A check gets those facts that its parameters name."""
    rows: list[Check] = []
    for one in sorted(_REGISTERED, key=lambda one: typing.get_args(Group).index(one.group)):
        if place in one.places and not (fast and one.is_slow):
            names = inspect.signature(one.function).parameters
            found = one.function(**{name: facts[name] for name in names if name in facts})
            rows += [found] if isinstance(found, Check) else found
    return rows


def table_lines(checks: Iterable[Check], columns: int, paint: Callable[[str, Severity], str] = lambda text, _: text) -> list[str]:
    """Return the rows as lines of at most `columns` characters; `paint` colours the word of a severity."""
    indent = " " * (_MARK_COLUMNS + _NAME_COLUMNS)
    width = max(_LEAST_COLUMNS, columns) - len(indent)
    lines = [f"{'':{_MARK_COLUMNS}}{'check':{_NAME_COLUMNS}}found"]
    for check in checks:
        mark = paint(f"{check.severity.name.lower():{_MARK_COLUMNS}}", check.severity)
        parts = [check.found]
        if check.severity > Severity.OK:
            parts += [f"{label}: {text}" for label, text in (("needed", check.needed), ("remedy", check.remedy)) if text]
        texts = [printable(" ".join(part.split())) for part in parts]
        wrapped = [
            line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
        ]
        lines.append(f"{mark}{check.name:{_NAME_COLUMNS - 1}} {wrapped[0]}")
        lines += [f"{indent}{line}" for line in wrapped[1:]]
    return lines


def write_checks(checks: Sequence[Check], stream: IO[str], *, as_json: bool) -> None:
    if as_json:
        rows = [asdict(check) | {"severity": check.severity.name.lower()} for check in checks]
        ready = all(check.severity < Severity.ERROR for check in checks)
        stream.write(json.dumps({"ready": ready, "checks": rows}, ensure_ascii=False, indent=2) + "\n")
        return
    columns = bar_columns(stream) if stream.isatty() else 80
    painted = stream.behind if isinstance(stream, PrintableStream) else stream  # the lines are printable, except for the colours
    painted.write(
        "\n".join(table_lines(checks, columns, lambda text, severity: coloured(text, _COLOURS.get(severity), stream))) + "\n"
    )


def refuse_errors(checks: Iterable[Check]) -> None:
    failed = [check.name for check in checks if check.severity is Severity.ERROR]
    if failed:
        raise ConfigError(f"this machine cannot train yet: {', '.join(failed)}; the remedy is below each of these rows")
