"""Checks of the settings of Compose: `.env`, the shell, and the files of the services. Standard library and `common` alone.

The names come from the Compose files, and the kind of a value from the line that uses it. So a new setting needs no entry here.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.paths import ENV, RECIPES
from common.text import format_bytes
from trainer.doctor.check import Check, Severity, check
from trainer.doctor.inputs import read_variables
from trainer.doctor.ulimits import NEEDED_SHM_BYTES

_USED = re.compile(r"\$\{([A-Z][A-Z0-9_]*)(?::?-([^}$]*))?")
_PASSED_ON = re.compile(r"^ *([A-Z][A-Z0-9_]*):", re.MULTILINE)
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgtpKMGTP]?)i?[bB]?"
_DURATION = r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:h|m|s|ms|us|µs|ns))+"
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_NAME = r"(?!\.{1,2}(?:/|$))[^/]+"
_IMAGE = r"[a-z0-9][a-z0-9._/:-]*(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
_GPU_IDS = re.compile(r"(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9a-fA-F/-]+)(?:,(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9a-fA-F/-]+))*")
_OF_COMPOSE = ("COMPOSE_", "DOCKER_", "BUILDKIT_", "BUILDX_")
IMAGE_USER = 1000  # user and group of the image
_LEAST_MEMORY_BYTES = 1 << 30
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_MOST_VISITED = 2000
_FOR_SERVICES = {"train.env": "TRAIN_", "prepare.env": "PREP_"}
_ALL_SETTINGS = "all settings: docs/reference/settings.md"


@dataclass(frozen=True)
class Declaration:
    name: str
    default: str
    line: str
    file: str


@dataclass(frozen=True)
class Settings:
    values: Mapping[str, str]  # those of `.env` and of the shell, which has priority
    written: Mapping[str, str]  # those of `.env` alone
    problems: tuple[str, ...] = ()  # lines of `.env` that Compose refuses
    file: str = ".env"

    def get(self, name: str, default: str = "") -> str:
        # as Compose does: an empty value counts as not set
        return self.values.get(name) or default

    def number(self, name: str, default: int) -> int:
        text = self.get(name)
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else default


def read_settings(path: Path, shell: Mapping[str, str]) -> Settings:
    written, problems = read_variables(path)
    return Settings({**written, **shell}, written, tuple(problems), str(path))


def read_declarations(folder: Path = ENV.parent) -> list[Declaration]:
    return [
        Declaration(used[1], (used[2] or "").strip('"'), line.strip(), path.name)
        for path in sorted(folder.glob("docker-compose*.yml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
        for used in _USED.finditer(line)
    ]


@check("settings", "host")
def check_settings(settings: Settings, num_gpus: int, runs_here: Callable[[int], bool], folder: Path = ENV.parent) -> list[Check]:
    """Return one row for each problem of the settings, or one row that says that there is none."""
    declared = read_declarations(folder)
    files = (*folder.glob("docker-compose*.yml"), *folder.glob("env/settings/*.yml"))
    known = {one.name for one in declared}.union(*(_PASSED_ON.findall(path.read_text(encoding="utf-8")) for path in files))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("docker-compose*.yml")))
    context = _Context(settings, num_gpus, runs_here, folder, declared, text)
    rows = [*_lines(settings.file, settings.problems)]
    checked: set[tuple[str, str]] = set()
    for one in declared:
        value, is_used = settings.get(one.name, one.default), one.name in settings.values or one.file == "docker-compose.yml"
        kind = next((kind for kind in _KINDS if kind.applies_to(one)), None)
        if kind is None or not value or not is_used or "$" in value or (one.name, kind.line) in checked:
            continue
        checked.add((one.name, kind.line))
        if not re.fullmatch(kind.form, value, re.ASCII):
            remedy = f"set {one.name} in .env to such a value ({one.name}={kind.example}), or remove the line"
            rows.append(_row(one.name, f"{one.name}={value} cannot be used", kind.needed, remedy))
        elif kind.more is not None:
            rows += kind.more(one.name, value, context)
    rows += [*_gpus(context), *_compose_own(context), *_unknown(context, known)]
    return rows or [Check("settings", f"{len(settings.written)} variables in {settings.file}, all known and valid")]


@dataclass(frozen=True)
class _Context:
    settings: Settings
    num_gpus: int
    runs_here: Callable[[int], bool]
    folder: Path
    declared: list[Declaration]
    text: str  # all Compose files together

    def path(self, value: str) -> Path:
        return self.folder / (f"{Path.home()}{value[1:]}" if value.startswith("~/") else value)

    def kind(self, value: str) -> Literal["folder", "file", "nothing"]:
        with suppress(OSError):  # a name that is longer than the file system allows
            return "folder" if self.path(value).is_dir() else "file" if self.path(value).exists() else "nothing"
        return "nothing"


def _row(name: str, found: str, needed: str, remedy: str, severity: Severity = Severity.ERROR) -> Check:
    return Check(name, found, severity, needed, remedy)


def _lines(file: str, problems: Iterable[str]) -> Iterator[Check]:
    return (
        _row(Path(file).name, problem, "NAME=VALUE lines with closed quotes", f"correct the line in {file}") for problem in problems
    )


def _size(name: str, value: str, context: _Context) -> Iterator[Check]:
    number, unit = re.findall(_SIZE, value)[0]
    size = int(float(number) * 1024 ** " kmgtp".index(unit.lower() or " "))
    if f"mem_limit: ${{{name}" in context.text and size:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not _LEAST_MEMORY_BYTES <= size <= total:
            needed = f"{format_bytes(_LEAST_MEMORY_BYTES)} to {format_bytes(total)}, the memory of this machine; 0: no limit"
            found, severity = ("too small", Severity.ERROR) if size < total else ("too large", Severity.WARNING)
            yield _row(name, f"{name}={value} is {found}", needed, f"correct {name} in .env", severity)
    elif f"shm_size: ${{{name}" in context.text and size < NEEDED_SHM_BYTES:
        found, needed = f"{name}={value} is too small for several GPUs", f"{format_bytes(NEEDED_SHM_BYTES)} or more"
        yield _row(name, found, needed, f"set {name}=2gb in .env, or remove the line", Severity.WARNING)


def _duration(name: str, value: str, context: _Context) -> Iterator[Check]:
    seconds = sum(float(one) * _SECONDS.get(unit, 0.0) for one, unit in re.findall(r"([0-9.]{1,20})([a-zµ]{1,2})", value))
    saving = context.settings.number("PET_SHUTDOWN_TIMEOUT", 60)
    if seconds <= saving:
        found = f"{name}={value}, but the ranks may take {saving} s to save (PET_SHUTDOWN_TIMEOUT)"
        yield _row(name, found, f"more than {saving} s", f"set {name}={2 * saving}s in .env", Severity.WARNING)


def _port(name: str, value: str, context: _Context) -> Iterator[Check]:
    try:
        socket.create_server(("127.0.0.1", int(value))).close()
    except PermissionError:
        return  # the engine may listen there
    except OSError:
        if not context.runs_here(int(value)):
            found = f"port {value} ({name}) is used by another program"
            yield _row(name, found, "a free port on 127.0.0.1", f"set {name} in .env to another port", Severity.WARNING)


def _folder(name: str, value: str, context: _Context) -> Iterator[Check]:
    row, kind = f"{name.removesuffix('_DIR').lower()} folder", context.kind(value)
    needed = f"a folder ({name}) that the user of the services can read"
    if kind != "folder":
        found = f"{value} is a file and not a folder" if kind == "file" else f"{value} does not exist, so it is not a folder"
        yield _row(row, found, needed, f"set {name} in .env to an existing folder, or create it: mkdir -p {value}")
        return
    user, group = (context.settings.number(one, IMAGE_USER) for one in ("RUN_UID", "RUN_GID"))
    below = (Path(folder, one) for folder, folders, files in os.walk(context.path(value)) for one in (*folders, *files))
    for path in (context.path(value), *itertools.islice(below, _MOST_VISITED)):
        try:
            status = path.stat()
        except OSError:
            continue  # a broken link, or below a folder that is reported itself
        # The services have no capabilities, so root is as any user.
        mode = status.st_mode >> (6 if status.st_uid == user else 3 if status.st_gid == group else 0)
        wanted = 5 if stat.S_ISDIR(status.st_mode) else 4
        if mode & wanted != wanted:
            remedy = f"chmod -R a+rX {value}; or set RUN_UID and RUN_GID in .env to the owner of the files"
            yield _row(row, f"{path} cannot be read by user {user} (RUN_UID)", needed, remedy)
            return


def _file(name: str, value: str, context: _Context) -> Iterator[Check]:
    if context.kind(value) != "file" or not os.access(context.path(value), os.R_OK):
        found = f"{name}={value} is not a file that can be read"
        yield _row(name, found, "a readable file", f"correct {name} in .env, or remove the line")


def _command(name: str, value: str, _: _Context) -> Iterator[Check]:
    try:
        shlex.split(value)
    except ValueError as error:
        found = f"{name} cannot be split into words: {str(error).lower()}"
        yield _row(name, found, "options with closed quotes", f"close the quote in {name}")


def _recipe(name: str, value: str, _: _Context) -> Iterator[Check]:
    names = ["auto", *sorted(path.stem for path in RECIPES.glob("*.toml"))]
    if value not in names and not value.endswith(".toml"):
        found = f"{name}={value} is not in env/recipes"
        yield _row(name, found, ", ".join(names), f"correct {name} in .env{_like(value, names)}")


def _volume(name: str, value: str, context: _Context) -> Iterator[Check]:
    tables = re.findall(r"^volumes:\n((?: .*\n?)+)", context.text, re.MULTILINE)
    volumes = [found for table in tables for found in re.findall(r"^  ([\w.-]+):$", table, re.MULTILINE)]
    is_path = value.startswith((".", "/", "~"))
    if not is_path and value not in volumes:
        found, remedy = f"{name}={value} is no volume of the Compose files, and no path", f"for a folder write {name}=./{value}"
        yield _row(name, found, f"{', '.join(volumes)}, or a path", remedy)
    if is_path and context.kind(value) == "nothing":
        found, remedy = f"{value} does not exist, and the engine would create it for root", f"mkdir -p {value}, as the user RUN_UID"
        yield _row(name, found, "a folder", remedy, Severity.WARNING)


@dataclass(frozen=True)
class _Kind:
    line: str  # form of a line of a Compose file that uses a setting, whose place is NAME
    form: str
    needed: str
    example: str
    more: Callable[[str, str, _Context], Iterator[Check]] | None = None  # a further check of a value of this form

    def applies_to(self, use: Declaration) -> bool:
        if not self.line:
            return re.fullmatch(r"-?[0-9]+", use.default) is not None
        return re.search(self.line.replace("NAME", rf"\$\{{{use.name}\b"), use.line) is not None


_KINDS = (
    _Kind(r"(?:mem_limit|shm_size): NAME|size=NAME", _SIZE, "a number with b, k, m or g after it", "2gb", _size),
    _Kind(r"stop_grace_period: NAME", _DURATION, "numbers with h, m or s after them", "120s", _duration),
    _Kind(r"127\.0\.0\.1:NAME", _PORT, "a number from 1 to 65535", "6007", _port),
    _Kind(r"restart: NAME", r"no|on-failure(?::[0-9]{1,6})?", "no, or on-failure:N, which starts no finished run again", "no"),
    _Kind(r"user: .{0,40}NAME", r"[0-9]{1,9}", "the number of a user or group", "1000"),
    _Kind(r"source: \"?NAME", r".*", "", "", _folder),
    _Kind(r"\bfile: NAME", r".*", "", "", _file),
    _Kind(r"_ARGS: NAME", r"(?s:.*)", "", "", _command),
    _Kind(r"_RECIPE: .{0,40}NAME", r".*", "", "", _recipe),
    _Kind(r"/workspace/runs/NAME", rf"{_NAME}(?:/{_NAME})*", "the name of a folder, or several with / between them", "demo"),
    _Kind(r"/workspace/data/NAME", _NAME, "the name of one folder", "demo"),
    _Kind(r"^- NAME.{0,40}:/workspace", r".*", "", "", _volume),
    _Kind(r"(?:image|BASE_IMAGE): NAME", _IMAGE, "NAME[:TAG][@sha256:DIGEST], lower case", "trainer:local"),
    _Kind("", r"-1|[0-9]{1,18}", "a whole number", "1"),
)
"""Kinds of settings by their lines in the Compose files. The last one is for all settings whose default is a number."""


def _gpus(context: _Context) -> Iterator[Check]:
    gpus, ids, here = context.settings.get("GPUS", "all"), context.settings.get("GPU_IDS"), context.num_gpus
    known, remedy = re.findall(r"^  gpus-(\w+):", context.text, re.MULTILINE), "correct GPUS in .env; GPU_IDS=0,3 chooses GPUs"
    if gpus not in known:
        yield _row("GPUS", f"GPUS={gpus} is unknown", f"one of {', '.join(known)}", remedy)
    elif gpus.isdecimal() and int(gpus) > here:
        yield _row("GPUS", f"GPUS={gpus}, but this machine has {here} GPUs", "all, none, or a lower number", remedy)
    needed, remedy = "indexes or UUIDs of nvidia-smi -L, with commas between them", "correct GPU_IDS in .env, or remove the line"
    if ids and not _GPU_IDS.fullmatch(ids):
        yield _row("GPU_IDS", f"GPU_IDS={ids} is no list of GPUs", needed, remedy)
    elif missing := [one for one in ids.split(",") if one.isdecimal() and int(one) >= here]:
        yield _row("GPU_IDS", f"GPU_IDS={ids}, but this machine has no GPU {missing[0]}", needed, remedy)
    elif ids and gpus != "all":
        yield _row("GPU_IDS", f"GPU_IDS={ids} and GPUS={gpus} are both set", "one of them", "remove GPUS from .env")


def _compose_own(context: _Context) -> Iterator[Check]:
    for name in filter(None, context.settings.get("COMPOSE_FILE").split(context.settings.get("COMPOSE_PATH_SEPARATOR", ":"))):
        if context.kind(name) != "file":
            yield _row("COMPOSE_FILE", f"{name} does not exist", "existing files", "correct COMPOSE_FILE, or remove the line")
    if (project := context.settings.get("COMPOSE_PROJECT_NAME")) and not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", project):
        found, needed = f"COMPOSE_PROJECT_NAME={project} is no name of a project", "lower-case letters, digits, - and _"
        yield _row("COMPOSE_PROJECT_NAME", found, needed, "correct COMPOSE_PROJECT_NAME in .env")


def _unknown(context: _Context, known: set[str]) -> Iterator[Check]:
    """Yield a row for each name that has no effect. Values are not shown, because they may be secrets."""
    settings = context.settings
    for name in settings.values:
        is_ours = name in settings.written or name.startswith(tuple(_FOR_SERVICES.values()))
        if is_ours and name not in known and not name.startswith(_OF_COMPOSE):
            place = settings.file if name in settings.written else "the shell"
            remedy = f"correct the name{_like(name, known)}, or put it into train.env or prepare.env; {_ALL_SETTINGS}"
            yield _row(name, f"{name} in {place} has no effect", "a known name", remedy, Severity.WARNING)
    from_env = {one.name for one in context.declared}
    for file, prefix in _FOR_SERVICES.items():
        values, problems = read_variables(context.folder / file)
        yield from _lines(file, problems)
        for name in values:
            if name in from_env:
                found, remedy = f"{name} has no effect in {file}", f"move the line to {settings.file}"
                yield _row(name, found, f"{name} in .env", remedy, Severity.WARNING)
            elif name.startswith(prefix) and name not in known:
                remedy = f"correct the name{_like(name, known)}; {_ALL_SETTINGS}"
                yield _row(name, f"{name} in {file} is not a setting", "a known name", remedy)


def _like(name: str, known: set[str] | list[str]) -> str:
    similar = difflib.get_close_matches(name, sorted(known), 1)
    return f": perhaps {similar[0]}" if similar else ""
