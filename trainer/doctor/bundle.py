"""An archive for a bug report: the rows of the doctor, versions, and facts about a run. Everything in it is chosen.

A run may come from a stranger and hold texts of its user. So nothing is copied: numbers, and words from fixed lists, are taken out
of settings, record and metrics, and every text goes through the redactor.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic.fields import FieldInfo

from common.errors import CheckpointError, ConfigError
from common.files import canonical_json, open_input, parse_json, plain, write_atomic
from common.settings.dotted import flatten
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.model import setting_names
from common.settings.toml import parse_toml
from common.untrusted import MAX_RECORD_BYTES, read_lines, read_run_file
from trainer.config import TrainConfig
from trainer.doctor.check import Check, to_json
from trainer.doctor.redactor import Redactor

__all__ = ["Contents", "check_place", "kept_facts", "kept_lines", "kept_settings", "read_contents", "write_bundle"]

_PartT = TypeVar("_PartT")
_SUFFIX = ".tar.gz"
_LAST_LINES, _LAST_EVENTS = 200, 200
_LOG_BYTES = 1 << 20
_MAX_LINE_CHARS = 400
_FACTS = {"status": r"[a-z]{1,16}", "ended_by": r"[a-z_]{1,24}[.][a-z_]{1,24}", "weights": r"sha256:[0-9a-f]{64}"}
"""Texts of a record that are kept, with their forms."""
_ENVIRONMENT = (
    *("python", "torch", "cuda", "cudnn", "nccl", "driver", "packages", "locks", "lock", "unlocked", "processor", "platform"),
    *("gpus", "gpu_memory_bytes", "image_base", "image_digest", "system_packages", "code", "world_size"),
)
"""Facts of an environment that are kept. `image` may name a private registry."""
_WORDS = {"event": r"[a-z_]{1,24}", "rule": r"[a-z_]{1,32}", "severity": r"[a-z]{1,16}", "action": r"[a-z_]{1,16}"}
"""Texts of an event that are kept, with their forms."""
_HEX_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+|nan|-?inf")
_PACKAGE, _VERSION = re.compile(r"[A-Za-z0-9._-]{1,80}"), re.compile(r"[0-9]+[\w.+!-]{0,40}")
_WITH_TEXTS = ("sample", "scores")
"""Events that hold texts of the data."""
_SERVICE = re.compile(r"^[\w.-]+\s+\| ")
"""`docker compose logs` begins each line with the name of the container."""
_OWN_LINE = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|error|stopped|warning|critical|info): "
    r"|(?:\d\d:\d\d:\d\d +)?step \d+(?:/\d+)?  (?:loss|validation loss) "
    r"|Traceback |  File \"|\[?rank\d+\]?:|[\w.]+(?:Error|Exception|Warning): |NCCL (?:INFO|WARN) "
)
"""The lines that the programs write without texts of the data."""
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|“[^”]*”|`[^`]*`")
_PLAIN_QUOTE = re.compile(r".[\w./:=<>-]{0,60}.")


@dataclass(frozen=True)
class Contents:
    """What a run gives to the archive; None for a part that is missing."""

    settings: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] | None = None
    log: list[str] | None = None
    problems: tuple[str, ...] = ()
    """One line for each file that cannot be read: a damaged run needs a bug report most."""


def read_contents(run: Path | None, log: Path | None) -> Contents:
    """Return what a run and a log file give to the archive.

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
        except (CheckpointError, OSError, ValueError) as error:
            problems.append(f"{name} cannot be read: {error}")
        return None

    settings, record = tried("config.toml", _settings), tried("record.json", _record)
    return Contents(settings, record, tried("metrics.jsonl", _metrics), lines, tuple(problems))


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
    """Return settings by their dotted names: numbers, and words that the setting allows. Other texts become their length."""
    names = setting_names(TrainConfig)
    kept: dict[str, Any] = {}
    for name, value in flatten(settings).items():
        field = names.get(name)
        if field is not None:
            kept[name] = _kept_value(field, value)
        else:
            kept["others"] = kept.get("others", 0) + 1
    return kept


def _kept_value(field: FieldInfo, value: Any) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, str):
        return value if value in _words_of(field.annotation) else f"<text of {len(value)} characters>"
    return [_kept_value(field, one) for one in value] if isinstance(value, list) else "<table>"


def _words_of(annotation: Any) -> set[str]:
    """Return the words that a type such as `Literal["a", "b"] | None` allows."""
    if typing.get_origin(annotation) is Literal:
        return {word for word in typing.get_args(annotation) if isinstance(word, str)}
    inner = [_words_of(part) for part in typing.get_args(annotation)]
    return {"none"}.union(*inner)


def kept_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a record, its state, and its numbers. Settings and names of files are left out."""
    environment = record.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    kept = {
        name: value for name, form in _FACTS.items() if isinstance(value := record.get(name), str) and re.fullmatch(form, value)
    }
    if isinstance(record.get("step"), int):
        kept["step"] = record["step"]
    return {**kept, "environment": {name: environment[name] for name in _ENVIRONMENT if name in environment}}


def _metrics(run: Path) -> list[dict[str, Any]]:
    """Return the last events with their numbers."""
    last = deque(read_lines(run / "metrics.jsonl", run), maxlen=_LAST_EVENTS)
    events = []
    for line in last:
        try:
            event = parse_json(line)
        except ValueError:  # the line of a run that was killed while it wrote
            continue
        if isinstance(event, dict) and event.get("event") not in _WITH_TEXTS:
            events.append(_kept_event(event))
    return events


def _kept_event(event: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in event.items():
        if not re.fullmatch(r"[a-z0-9_]{1,48}", name):
            continue
        is_word = isinstance(value, str) and (_HEX_FLOAT.fullmatch(value) or (name in _WORDS and re.fullmatch(_WORDS[name], value)))
        if is_word or value is None or isinstance(value, bool | int | float):
            kept[name] = value
    return kept


def _last_lines(log: Path) -> list[str]:
    """Return the lines in the last MiB of a log file."""
    with open_input(log) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _LOG_BYTES))
        text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    return re.split(r"[\r\n]+", text)


def kept_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines that the programs write themselves. Samples, and other lines that may hold texts, are counted.

    Quoted parts with white space or unusual characters may hold texts too, and are replaced.
    """
    kept: deque[str] = deque(maxlen=_LAST_LINES)
    left_out = 0
    for line in lines:
        own = _SERVICE.sub("", line.rstrip())
        if _OWN_LINE.match(own):
            kept.append(_QUOTED.sub(_without_text, own)[:_MAX_LINE_CHARS])
        elif own.strip():
            left_out += 1
    return [*kept, f"({left_out} other lines are left out, because they may hold texts)"] if left_out else list(kept)


def _without_text(found: re.Match[str]) -> str:
    return found.group() if _PLAIN_QUOTE.fullmatch(found.group()) else "<text>"


def check_place(path: Path) -> None:
    """Check the name of the archive before the work begins.

    Raises:
        ConfigError: it does not end with .tar.gz, or there is a file of this name.
    """
    if not path.name.endswith(_SUFFIX):
        raise ConfigError(f"{path}: the archive needs a name that ends with {_SUFFIX}")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already; name another file for the archive")


def write_bundle(
    path: Path, checks: Sequence[Check], versions: Mapping[str, Any], contents: Contents, redactor: Redactor
) -> list[str]:
    """Write the archive atomically, and return one line for each file in it: its name and what it holds.

    Args:
        path: of the archive; see `check_place`.
        checks: the rows of the doctor.
        versions: of libraries, and of the installed packages by the name `packages`.
        contents: facts about a run.
        redactor: changes every text.

    Raises:
        ConfigError: see `check_place`.
        OSError: it cannot be written.
    """
    check_place(path)
    files = {
        "doctor.json": (redactor.value(json.loads(to_json(checks))), "the rows of the doctor"),
        "versions.json": (_with_packages(versions, redactor), "versions of Python, PyTorch and all packages"),
    }
    if contents.settings is not None:
        files["settings.json"] = (redactor.value(contents.settings), "settings of the run; texts and paths are only counted")
    if contents.record is not None:
        environment = _with_packages(contents.record["environment"], redactor)
        record = {**redactor.value({**contents.record, "environment": {}}), "environment": environment}
        files["record.json"] = (record, "environment and result of the run")
    if contents.metrics is not None:
        files["metrics.json"] = (redactor.value(contents.metrics), f"numbers of the last {len(contents.metrics)} events of the run")
    if contents.log is not None:
        files["log.json"] = (redactor.value(contents.log), f"the last {len(contents.log)} lines of the log that hold no texts")
    listed = [f"{name:<15} {meaning}" for name, (_, meaning) in files.items()]
    listed += [redactor.text(f"not in it: {problem}") for problem in contents.problems]
    members = {name: canonical_json(plain(value)) for name, (value, _) in files.items()}
    members["README.txt"] = "\n".join((*listed, "", *_LEFT_OUT, "")).encode()
    write_atomic(path, _archive(members))
    return listed


def _with_packages(versions: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Return redacted facts. The versions of packages have a separate form, because some look like addresses."""
    packages = versions.get("packages")
    kept = {
        name: redactor.without_secrets(version)
        for name, version in (packages.items() if isinstance(packages, dict) else ())
        if isinstance(version, str) and _PACKAGE.fullmatch(name) and _VERSION.fullmatch(version)
    }
    return {**redactor.value({name: value for name, value in versions.items() if name != "packages"}), "packages": kept}


_LEFT_OUT = (
    "Left out: texts of the data, samples and prompts; values of environment variables whose names say that they are secret;",
    "addresses; names of hosts and users; paths of home folders. Look into the files before you send them.",
)


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
