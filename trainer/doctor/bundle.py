"""An archive for a bug report: what the doctor found, versions, and facts about a run.

A run may come from a stranger and hold texts of its user. So no text is copied and then cleaned. The archive has only values of
types that cannot hold a secret: numbers of fields that this program writes, versions, digests, and texts of its own source code
(`trainer.doctor.own_words`).
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, open_input, parse_json, plain, write_atomic
from common.places import ENV
from common.settings.dotted import flatten
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.model import setting_names
from common.settings.toml import parse_toml
from common.untrusted import MAX_COUNT, MAX_RECORD_BYTES, read_run_file
from trainer.config import TrainConfig
from trainer.doctor.check import Check
from trainer.doctor.own_words import is_own_word, own_parts, own_place
from trainer.machine.locks import lock_name, unlocked_packages

__all__ = ["Contents", "check_place", "kept_facts", "kept_lines", "kept_row", "kept_settings", "read_contents", "write_bundle"]

_PartT = TypeVar("_PartT")
_SUFFIX = ".tar.gz"
_LAST_LINES, _LAST_EVENTS = 200, 200
_LAST_BYTES = 1 << 20
_MAX_LINE_CHARS = 1000
_VERSION = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,2}(?:(?:a|b|rc|\.post|\.dev)[0-9]{1,4})?(?:\+(?:cpu|cu[0-9]{2,3}))?", re.ASCII)
"""A version of at most three numbers. An IP address has four."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}(?:-dirty)?", re.ASCII)
_QUANTITY = re.compile(r"(?<![\w.])[0-9]{1,6}(?:\.[0-9]{1,3})? (?:[kMGT]i?B(?:/s)?|ms|MHz|°C)(?!\w)", re.ASCII)
"""A number with a unit, as the doctor's rows have them."""
_VERSIONS = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
_DIGESTS = ("image_base", "image_digest", "system_packages")


@dataclass(frozen=True)
class Contents:
    """The facts that a run and a log give to the archive; None for a part that is missing."""

    settings: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] | None = None
    log: list[str] | None = None
    problems: tuple[str, ...] = ()
    """One line for each file that cannot be read: a damaged run needs a bug report most."""


def read_contents(run: Path | None, log: Path | None, parse_event: Callable[[Any], object]) -> Contents:
    """Return the facts that a run and a log file give to the archive.

    Args:
        run: the run's directory.
        log: output of a training.
        parse_event: returns the event in a value of metrics.jsonl, as an object with the fields that this program writes.

    Raises:
        OSError, UnusableFileError: the log file cannot be read.
    """
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

    settings, record = tried("config.toml", _settings), tried("record.json", _record)
    return Contents(settings, record, tried("metrics.jsonl", lambda run: _events(run, parse_event)), lines, tuple(problems))


def _settings(run: Path) -> dict[str, Any]:
    settings = parse_toml(read_run_file(run / "config.toml", MAX_SETTINGS_BYTES, run)).get("train")
    if not isinstance(settings, dict):
        raise ValueError("it has no table [train]")
    return kept_settings(settings)


def _record(run: Path) -> dict[str, Any]:
    record = parse_json(read_run_file(run / "record.json", MAX_RECORD_BYTES, run))
    if not isinstance(record, dict):
        raise ValueError("it is not a table")
    return kept_facts(record)


def kept_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their dotted names, with the values that are numbers or words of a fixed set. All others are left out."""
    names = setting_names(TrainConfig)
    known = ((name, value) for name, value in flatten(settings).items() if name in names)
    return {name: value for name, value in known if _is_allowed(value, names[name].annotation)}


def _is_allowed(value: Any, annotation: Any) -> bool:
    """Return whether a value is a number or a word that a type such as `int | Literal["auto"] | None` allows, or a list of them."""
    if isinstance(value, list):
        return all(_is_allowed(one, annotation) for one in value)
    if typing.get_origin(annotation) is Literal:
        return value in typing.get_args(annotation)
    kind = _number_type(value)
    is_number = annotation is kind or (annotation is float and kind is int)
    return is_number or any(_is_allowed(value, part) for part in typing.get_args(annotation))


def _number_type(value: Any) -> type | None:
    return type(value) if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= MAX_COUNT) else None


def kept_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run and the typed facts of its environment."""
    environment = record.get("environment")
    kept = {name: record[name] for name in ("status", "ended_by") if is_own_word(record.get(name))}
    if _number_type(record.get("step")) is int:
        kept["step"] = record["step"]
    return {**kept, "environment": kept_environment(environment if isinstance(environment, dict) else {})}


def kept_environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions, digests, the commit and the memory of each GPU, and the packages that differ from the lock.

    A package has its version, or None if it is missing or its version has another form. Only packages of the lock are named.
    """
    forms = {**dict.fromkeys(_VERSIONS, _VERSION), **dict.fromkeys(_DIGESTS, _DIGEST), "code": _COMMIT}
    texts = {name: value for name in forms if isinstance(value := facts.get(name), str)}
    ends = {name: text.rpartition("-g" if name == "code" else "@")[2] for name, text in texts.items()}  # IMAGE@DIGEST, TAG-gCOMMIT
    kept: dict[str, Any] = {name: end for name, end in ends.items() if forms[name].fullmatch(end)}
    memory, packages, lock = facts.get("gpu_memory_bytes"), facts.get("packages"), lock_name()
    if isinstance(memory, list):
        kept["gpu_memory_bytes"] = [one for one in memory[:16] if _number_type(one) is int]
    if isinstance(packages, dict) and lock is not None:
        installed = {name: version for name, version in packages.items() if isinstance(version, str)}
        versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in installed.items()}
        differing = unlocked_packages((ENV / lock).read_text(encoding="utf-8"), installed)
        kept["packages"] = {name: version if _VERSION.fullmatch(version := versions.get(name, "")) else None for name in differing}
    return kept


def _events(run: Path, parse_event: Callable[[Any], object]) -> list[dict[str, Any]]:
    """Return the last events of a run with their numbers and with the words of this program."""
    events: deque[dict[str, Any]] = deque(maxlen=_LAST_EVENTS)
    for line in _last_lines(run / "metrics.jsonl", run):
        try:
            event = parse_event(parse_json(line.encode()))
        except (ValueError, KeyError, TypeError, RecursionError):  # the line of a run that was killed while it wrote
            continue
        kept = {name: value for name, value in vars(event).items() if _number_type(value) or is_own_word(value)}
        events.append({"event": getattr(event, "name", "unknown"), **kept})
    return list(events)


def _last_lines(path: Path, below: Path | None = None) -> list[str]:
    """Return the lines in the last MiB of a file."""
    with open_input(path, below=below) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode("utf-8", "replace")
    return re.split(r"[\r\n]+", text)


def kept_lines(lines: Iterable[str]) -> list[str]:
    """Return the last messages of this program in a log: their constant parts, places in its files, and classes of errors.

    All other lines are counted. Lines of the log that are longer than a message are cut.
    """
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
    """Return name and severity of a row of the doctor, and of its finding the constant parts and the numbers with a unit."""
    found = check.found[:_MAX_LINE_CHARS]
    return {
        "name": check.name,
        "severity": check.severity.name.lower(),
        "found": own_parts(found),
        "values": _QUANTITY.findall(found),
    }


def check_place(path: Path) -> None:
    """Check the name of the archive before the work begins.

    Raises:
        ConfigError: it does not end with .tar.gz, or there is a file of this name.
    """
    if not path.name.endswith(_SUFFIX):
        raise ConfigError(f"{path}: the archive needs a name that ends with {_SUFFIX}")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; name another file for the archive")


def write_bundle(path: Path, checks: Sequence[Check], versions: Mapping[str, Any], contents: Contents) -> list[str]:
    """Write the archive atomically, and return one line for each file in it: its name and its content.

    Args:
        path: of the archive; see `check_place`.
        checks: the rows of the doctor.
        versions: facts about this environment; see `trainer.machine.environment.environment_facts`.
        contents: facts about a run.

    Raises:
        ConfigError: see `check_place`.
        OSError: it cannot be written.
    """
    check_place(path)
    files: dict[str, tuple[Any, str]] = {
        "doctor.json": ([kept_row(check) for check in checks], "rows of the doctor, without names, paths and addresses"),
        "versions.json": (kept_environment(versions), "versions, and the packages that differ from the lock"),
        "settings.json": (contents.settings, "settings of the run that are numbers or words of a fixed set"),
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
    """Return a compressed archive of files without owner and time."""
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
