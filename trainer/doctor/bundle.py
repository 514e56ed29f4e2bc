"""An archive for a bug report: what the doctor found, versions, and facts about a run.

A run may come from a stranger and hold texts of its user. So no text is copied and then cleaned. The archive has only values of
types that cannot hold a secret: numbers, versions, digests, and texts of this program's source code (`trainer.doctor.own_words`).
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, open_input, parse_json, plain, write_atomic
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.toml import parse_toml
from common.untrusted import MAX_COUNT, MAX_RECORD_BYTES, read_run_file
from trainer.doctor.check import Check
from trainer.doctor.own_words import is_own_word, own_parts, own_place
from trainer.runs.layout import CONFIG, METRICS, RECORD

_PartT = TypeVar("_PartT")
_SUFFIX = ".tar.gz"
_LAST_LINES, _LAST_EVENTS = 200, 200
_LAST_BYTES = 1 << 20
_MAX_LINE_CHARS = 1000
_MAX_LIST = 64
_PLAIN = re.compile(
    r"(?:.*-g)?([0-9a-f]{40}(?:-dirty)?)"  # a commit, or TAG-gCOMMIT
    r"|(?:.*@)?(sha256:[0-9a-f]{64})"  # a digest, or IMAGE@DIGEST
    # A version of at most three numbers. An IP address has four.
    r"|([0-9]{1,5}(?:\.[0-9]{1,5}){1,2}(?:(?:a|b|rc|\.post|\.dev)[0-9]{1,4})?(?:\+(?:cpu|cu[0-9]{2,3}))?)",
    re.ASCII,
)
_QUANTITY = re.compile(r"(?<![\w.])[0-9]{1,6}(?:\.[0-9]{1,3})? (?:[kMGT]i?B(?:/s)?|ms|MHz|°C)(?!\w)", re.ASCII)
"""A number with a unit, as the doctor's rows have them."""


@dataclass(frozen=True)
class Contents:
    settings: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] | None = None
    log: list[str] | None = None
    problems: tuple[str, ...] = ()  # one line for each file that cannot be read: a damaged run needs a bug report most


def read_contents(run: Path | None, log: Path | None) -> Contents:
    lines = None if log is None else kept_lines(_last_lines(log))
    if run is None:
        return Contents(log=lines)
    problems: list[str] = []

    def tried(name: str, read: Callable[[Path], _PartT]) -> _PartT | None:
        try:
            return read(run)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except (CheckpointError, OSError, ValueError, RecursionError) as error:
            problems.append(f"{name} cannot be read: {own_parts(str(error)) or type(error).__name__}")
        return None

    settings, record = tried(CONFIG, _settings), tried(RECORD, _record)
    return Contents(settings, record, tried(METRICS, _events), lines, tuple(problems))


def _settings(run: Path) -> dict[str, Any]:
    settings = parse_toml(read_run_file(run / CONFIG, MAX_SETTINGS_BYTES, run)).get("train")
    if not isinstance(settings, dict):
        raise ValueError("it has no table [train]")
    return _kept_table(settings)


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


def _last_lines(path: Path, below: Path | None = None) -> list[str]:
    with open_input(path, below=below) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode("utf-8", "replace")
    return re.split(r"[\r\n]+", text)


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


def kept_row(check: Check) -> dict[str, Any]:
    found = check.found[:_MAX_LINE_CHARS]
    return {
        "name": check.name,
        "severity": check.severity.name.lower(),
        "found": own_parts(found),
        "values": _QUANTITY.findall(found),
    }


def check_place(path: Path) -> None:
    """Refuse a name that does not end with .tar.gz, or that a file has, before the work begins."""
    if not path.name.endswith(_SUFFIX):
        raise ConfigError(f"{path}: the archive needs a name that ends with {_SUFFIX}")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; name another file for the archive")


def write_bundle(path: Path, checks: Sequence[Check], versions: Mapping[str, Any], contents: Contents) -> list[str]:
    """Write the archive atomically, and return a line for each file in it. `versions` are `environment_facts`."""
    check_place(path)
    files: dict[str, tuple[Any, str]] = {
        "doctor.json": ([kept_row(check) for check in checks], "rows of the doctor, without names, paths and addresses"),
        "versions.json": (kept(dict(versions)), "versions of this environment"),
        "settings.json": (contents.settings, "settings of the run that are numbers or words of this program"),
        "record.json": (contents.record, "environment and state of the run"),
        "metrics.json": (contents.metrics, "numbers of the last events of the run"),
        "log.json": (contents.log, "messages of this program in the log, without their values"),
    }
    members = {name: canonical_json(plain(value)) for name, (value, _) in files.items() if value is not None}
    listed = [f"{name:<15} {files[name][1]}" for name in members]
    listed += [f"not in it: {problem}" for problem in contents.problems]
    members["README.txt"] = "\n".join((*listed, "")).encode()
    write_atomic(path, _archive(members))
    return listed


def _archive(members: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=target, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in sorted(members.items()):
            entry = tarfile.TarInfo(f"doctor/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()
