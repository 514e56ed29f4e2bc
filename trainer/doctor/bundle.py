"""An archive for a bug report: what the doctor found, versions, and facts about a run.

A run may come from a stranger and hold texts of its user. So no text is copied and then cleaned. The archive has only values of
types that cannot hold a secret: numbers, versions, digests, and texts of this program's own source code, which are published.
"""

from __future__ import annotations

import ast
import builtins
import gzip
import io
import re
import tarfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import common.errors
from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, open_input, parse_json, plain, write_atomic
from common.paths import ROOT
from common.settings.load import MAX_SETTINGS_BYTES
from common.untrusted import MAX_COUNT, MAX_RECORD_BYTES, read_run_file
from trainer.doctor.check import Check
from trainer.runs.layout import CONFIG, METRICS, RECORD
from trainer.runs.saved_run import parse_settings

_PACKAGES = ("common", "data_pipeline", "trainer")
_SUFFIX = ".tar.gz"
_LAST_LINES, _LAST_EVENTS = 200, 200
_LAST_BYTES = 1 << 20
_MAX_LINE_CHARS = 1000
_MAX_LIST = 64
_FEWEST_CHARS = 12  # shorter parts of a message say too little about the message that they come from
_FRAME = re.compile(r"((?:common|data_pipeline|trainer)(?:/\w{1,60}){1,6}\.py)\", line ([0-9]{1,6})(?![0-9])", re.ASCII)
_ERROR = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){0,6}([A-Za-z_]\w{0,60})(?=:|$)", re.ASCII)
_PLAIN = re.compile(
    r"(?:.*-g)?([0-9a-f]{40}(?:-dirty)?)"  # a commit, or TAG-gCOMMIT
    r"|(?:.*@)?(sha256:[0-9a-f]{64})"  # a digest, or IMAGE@DIGEST
    # A version of at most three numbers. An IP address has four.
    r"|([0-9]{1,5}(?:\.[0-9]{1,5}){1,2}(?:(?:a|b|rc|\.post|\.dev)[0-9]{1,4})?(?:\+(?:cpu|cu[0-9]{2,3}))?)",
    re.ASCII,
)
_QUANTITY = re.compile(r"(?<![\w.])[0-9]{1,6}(?:\.[0-9]{1,3})? (?:[kMGT]i?B(?:/s)?|ms|MHz|°C)(?!\w)", re.ASCII)
"""A number with a unit, as the doctor's rows have them."""
_FILES = {
    "doctor.json": "rows of the doctor, without names, paths and addresses",
    "versions.json": "versions of this environment",
    "settings.json": "settings of the run that are numbers or words of this program",
    "record.json": "environment and state of the run",
    "metrics.json": "numbers of the last events of the run",
    "log.json": "messages of this program in the log, without their values",
}
"""The files of the archive, in the order of its list."""


@dataclass(frozen=True)
class Contents:
    files: dict[str, Any] = field(default_factory=dict)  # what a run and a log give to the archive, by the names of `_FILES`
    problems: tuple[str, ...] = ()  # one line for each file that cannot be read: a damaged run needs a bug report most


def read_contents(run: Path | None, log: Path | None) -> Contents:
    files: dict[str, Any] = {}
    problems = []
    for source, target, read in (
        (CONFIG, "settings.json", _settings),
        (RECORD, "record.json", _record),
        (METRICS, "metrics.json", _events),
    ):
        try:
            if run is not None:
                files[target] = read(run)
        except FileNotFoundError:
            problems.append(f"{source} is missing")
        except (CheckpointError, OSError, ValueError, RecursionError) as error:
            problems.append(f"{source} cannot be read: {own_parts(str(error)) or type(error).__name__}")
    if log is not None:
        files["log.json"] = kept_lines(_last_lines(log))
    return Contents(files, tuple(problems))


def _settings(run: Path) -> dict[str, Any]:
    return _kept_table(parse_settings(read_run_file(run / CONFIG, MAX_SETTINGS_BYTES, run)))


def _record(run: Path) -> dict[str, Any]:
    record = parse_json(read_run_file(run / RECORD, MAX_RECORD_BYTES, run))
    if not isinstance(record, dict):
        raise ValueError("it is not a table")
    return _kept_table({name: record.get(name) for name in ("status", "step", "ended_by", "environment")})


def _events(run: Path) -> list[dict[str, Any]]:
    events: deque[dict[str, Any]] = deque(maxlen=_LAST_EVENTS)
    for line in _last_lines(run / METRICS, run):
        try:
            event = parse_json(line.encode())
        except (ValueError, RecursionError):  # the line of a run that was killed while it wrote
            continue
        if isinstance(event, dict):
            events.append(_kept_table(event))
    return list(events)


def _last_lines(path: Path, below: Path | None = None) -> list[str]:
    with open_input(path, below=below) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode("utf-8", "replace")
    return re.split(r"[\r\n]+", text)


def check_place(path: Path) -> None:
    """Refuse a name that does not end with .tar.gz, or that a file has, before the work begins."""
    if not path.name.endswith(_SUFFIX):
        raise ConfigError(f"{path}: the archive needs a name that ends with {_SUFFIX}")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; name another file for the archive")


def write_bundle(path: Path, checks: Sequence[Check], versions: Mapping[str, Any], contents: Contents) -> list[str]:
    """Write the archive atomically, and return a line for each file in it. `versions` are `environment_facts`."""
    check_place(path)
    rows, facts = [kept_row(check) for check in checks], kept(dict(versions))
    found: dict[str, Any] = {"doctor.json": rows, "versions.json": facts, **contents.files}
    listed = [f"{name:<15} {about}" for name, about in _FILES.items() if name in found]
    listed += [f"not in it: {problem}" for problem in contents.problems]
    members = {name: canonical_json(plain(value)) for name, value in found.items()}
    members["README.txt"] = "\n".join((*listed, "")).encode()
    target = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=target, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in sorted(members.items()):
            entry = tarfile.TarInfo(f"doctor/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    write_atomic(path, target.getvalue())
    return listed


# What the archive holds of a value, a row and a line


def kept(value: Any) -> Any:
    """Return what the archive holds of a value: numbers, versions, digests, commits, own words, and tables and lists of them."""
    if isinstance(value, dict):
        return _kept_table(value)
    if isinstance(value, list):
        return [found for one in value[:_MAX_LIST] if (found := kept(one)) is not None]
    if isinstance(value, str):
        if is_own_word(value):
            return value
        found = _PLAIN.fullmatch(value[-_MAX_LINE_CHARS:])
        return None if found is None else found[found.lastindex or 0]
    return value if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= MAX_COUNT) else None


def _kept_table(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: kept(value) for name, value in values.items() if is_own_word(name)}
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def kept_row(check: Check) -> dict[str, Any]:
    found = check.found[:_MAX_LINE_CHARS]
    severity = check.severity.name.lower()
    return {"name": check.name, "severity": severity, "found": own_parts(found), "values": _QUANTITY.findall(found)}


def kept_lines(lines: Iterable[str]) -> list[str]:
    kept: deque[str] = deque(maxlen=_LAST_LINES)
    left_out = 0
    for line in lines:
        words = line.strip()[:_MAX_LINE_CHARS]
        if message := ": ".join(filter(None, (own_place(words), own_parts(words)))):
            kept.append(message)
        else:
            left_out += bool(words)
    return [*kept, f"other lines, left out: {left_out}"]


# The texts of this program's own source code


@cache
def _own_texts() -> frozenset[str]:
    texts: set[str] = set()
    for path in (path for package in _PACKAGES for path in (ROOT / package).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                texts.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                texts.add(node.target.id)  # a field of a class is a name in the file that the class describes
    return frozenset(texts)


@cache
def _parts() -> tuple[str, ...]:
    parts = {part for text in _own_texts() for part in re.split(r"%(?:\.\d)?[sdgf]|\n", text)}
    return tuple(sorted((part for part in parts if " " in part.strip() and len(part) >= _FEWEST_CHARS), key=len, reverse=True))


def is_own_word(value: object) -> bool:
    return isinstance(value, str) and value in _own_texts()


def own_parts(text: str) -> str:
    """Return the parts of a message that the source code holds, with `…` between them; empty if there are none."""
    found = []
    for part in _parts():
        if (place := text.find(part)) >= 0:
            found.append((place, part.strip()))
            text = text.replace(part, "\0" * len(part))
    return " … ".join(part for _, part in sorted(found))


def own_place(line: str) -> str:
    """Return FILE:LINE for a line of a traceback about a file of this program, or the class of a known error that begins a line."""
    if (frame := _FRAME.search(line)) and (ROOT / frame[1]).is_file():
        return f"{frame[1]}:{frame[2]}"
    error = _ERROR.match(line)
    known = error and next((found for home in (builtins, common.errors, torch) if (found := getattr(home, error[1], None))), None)
    return known.__name__ if isinstance(known, type) and issubclass(known, BaseException) else ""
