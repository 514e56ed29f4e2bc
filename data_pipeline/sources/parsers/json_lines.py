"""Read JSON Lines, more strictly than Python's `json`: no NaN, infinity, duplicate fields or deep nesting.

A fast parser reads the lines whose result is certain, and a strict one all others: the result does not depend on the fast one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import orjson

from data_pipeline.config import LimitConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.fields import missing_field
from data_pipeline.sources.parsers.source_format import (
    BOM,
    Content,
    MalformedError,
    Origin,
    SourceFormat,
    explain_bytes,
    has_surrogate,
)
from data_pipeline.sources.streams import Line, read_lines

_KEY_END = re.compile(rb'"[ \t\r\n]*:')
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|([\[{])|([\]}])', re.DOTALL)
_EXACT_BELOW = 2.0**63  # the fast parser returns larger integers as floats


def _read(content: Content) -> Iterator[Document | Rejection]:
    limits = content.config.limits
    for line in read_lines(content.blocks, limits.max_line_bytes, content.start, content.end):
        yield parse_json_line(line, content.origin, content.config.records, limits)


JSON_LINES = SourceFormat("jsonl", dict.fromkeys((".jsonl", ".ndjson", ".json-lines")), _read, markup="records", is_divisible=True)


def is_lines(first: bytes) -> bool:
    """Return whether a file that begins with these bytes has an object in its first line, and begins another one in the second."""
    line, _, rest = first.removeprefix(BOM).partition(b"\n")
    if not line.lstrip().startswith(b"{") or not rest.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def parse_json_line(line: Line, origin: Origin, records: RecordConfig, limits: LimitConfig) -> Document | Rejection:
    data = line.data.removeprefix(BOM) if line.offset == 0 else line.data
    try:
        if line.too_long:
            raise MalformedError(Reason.LINE_TOO_LONG, "longer than limits.max_line_bytes")
        if not data.strip():
            raise MalformedError(Reason.EMPTY, "an empty line")
        value = parse_quickly(data, limits.max_json_depth)
        if value is None or any(
            type(kept := value.get(name)) is float and abs(kept) >= _EXACT_BELOW for name in records.kept_fields
        ):
            value = parse_strictly(data, limits.max_json_depth)
        for field, setting in origin.needed(records).items():
            _check_field(value, field, setting, is_text=origin.markup != "chat")
        return origin.record(value, line.number, line.offset, records)
    except MalformedError as error:
        return Rejection.of_bytes(error.reason, origin.path, line.number, data, str(error), fields=error.fields)


def parse_quickly(data: bytes, max_depth: int) -> dict[str, Any] | None:
    """Return what the strict parser would, except for integers beyond 64 bits; None if that is not certain.

    If a line has as many quotes with a colon as the object has fields, no field is named twice. Other lines need the strict parser.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if type(value) is not dict or _count_fields(value, max_depth) != len(_KEY_END.findall(data)):
        return None
    return value


def parse_strictly(data: bytes, max_depth: int) -> Any:
    if data.count(b"[") + data.count(b"{") > max_depth:
        depth = 0
        for match in _BRACKETS.finditer(data):
            if match.lastindex is not None:
                depth += 1 if match.lastindex == 1 else -1
            if depth > max_depth:
                raise MalformedError(Reason.TOO_DEEP, f"nested deeper than limits.max_json_depth = {max_depth}")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise MalformedError(Reason.INVALID_UTF8, explain_bytes(data, error)) from None
    except RecursionError:
        raise MalformedError(Reason.TOO_DEEP, "nested too deeply") from None
    except MalformedError:
        raise
    except ValueError as error:  # JSONDecodeError, and integers of more digits than Python converts
        raise MalformedError(Reason.NOT_JSON, str(error)) from None


def _check_field(value: Any, name: str, setting: str, *, is_text: bool) -> None:
    if not isinstance(value, dict):
        raise MalformedError(Reason.NOT_AN_OBJECT, f"a JSON {type(value).__name__}, but an object is expected")
    if name not in value:
        raise missing_field("field", name, value, setting)
    if is_text and not isinstance(value[name], str):
        raise MalformedError(Reason.TEXT_NOT_A_STRING, f"field {name!r} is a {type(value[name]).__name__}")
    if is_text and has_surrogate(value[name]):
        raise MalformedError(Reason.LONE_SURROGATE, f"field {name!r} contains a lone surrogate")


def _count_fields(value: dict[str, Any], max_depth: int) -> int:
    """Count the fields of an object and of all objects in it; -1 if it is nested deeper than `max_depth`."""
    num_fields = 0
    level: list[Any] = [value]
    for _ in range(max_depth):
        below: list[Any] = []
        for container in level:
            is_object = type(container) is dict
            num_fields += is_object and len(container)
            below += [item for item in (container.values() if is_object else container) if type(item) in (dict, list)]
        level = below
        if not level:
            return num_fields
    return -1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise MalformedError(Reason.DUPLICATE_KEY, f"an object names field {twice!r} twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
