"""Checks of the settings of Compose: `.env`, the shell, and the files of the services. Standard library and `common` alone.

The names come from the Compose files, and the kind of a value from the line that uses it. So a new setting needs no entry here.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.places import ENV, RECIPES
from common.text import format_bytes
from trainer.doctor.check import Check, Severity
from trainer.doctor.env_file import read_variables
from trainer.doctor.limits import NEEDED_SHM_BYTES

__all__ = ["IMAGE_USER", "Declaration", "Settings", "bytes_of", "check_settings", "read_declarations", "read_settings"]

_USED = re.compile(r"\$\{([A-Z][A-Z0-9_]*)(?::?-([^}$]*))?")
_PASSED_ON = re.compile(r"^ *([A-Z][A-Z0-9_]*):", re.MULTILINE)
_SIZE = re.compile(r"([0-9]{1,15})(?:\.[0-9]{1,9})? ?(?:([kmgtp])?i?b?)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:h|m|s|ms|us|µs|ns))+")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_GPU_IDS = re.compile(r"(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9a-fA-F/-]+)(?:,(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9a-fA-F/-]+))*")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:-]*(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?", re.ASCII)
_OF_COMPOSE = ("COMPOSE_", "DOCKER_", "BUILDKIT_", "BUILDX_")
IMAGE_USER = 1000
"""User and group of the image."""
_LEAST_MEMORY_BYTES = 1 << 30
_LAST_PORT, _LAST_ID = 65535, 2**32 - 2
_MOST_VISITED = 2000
_FOR_SERVICES = {"train.env": "TRAIN_", "prepare.env": "PREP_"}
_ALL_SETTINGS = "all settings: docs/reference/settings.md"


@dataclass(frozen=True)
class Declaration:
    """A line of a Compose file that uses a setting."""

    name: str
    default: str
    line: str
    file: str


@dataclass(frozen=True)
class Settings:
    """The settings of a user."""

    values: Mapping[str, str]
    """Those of `.env` and of the shell, which has priority."""
    written: Mapping[str, str]
    """Those of `.env` alone."""
    problems: tuple[str, ...] = ()
    """Lines of `.env` that Compose refuses."""
    file: str = ".env"

    def get(self, name: str, default: str = "") -> str:
        """Return a value as Compose uses it: an empty one counts as not set."""
        return self.values.get(name) or default

    def number(self, name: str, default: int) -> int:
        """Return a value that is a number; the default for any other value."""
        text = self.get(name)
        return int(text) if text.isdecimal() else default


def read_settings(path: Path, shell: Mapping[str, str]) -> Settings:
    """Return the settings of a file and of the shell."""
    written, problems = read_variables(path)
    return Settings({**written, **shell}, written, tuple(problems), str(path))


def read_declarations(folder: Path = ENV.parent) -> list[Declaration]:
    """Return each use of a setting in the Compose files of a folder."""
    return [
        Declaration(used[1], (used[2] or "").strip('"'), line.strip(), path.name)
        for path in sorted(folder.glob("docker-compose*.yml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
        for used in _USED.finditer(line)
    ]


def bytes_of(text: str) -> int | None:
    """Return a size such as `2gb` in bytes, as the engine reads it; None if it is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number = float(re.match(r"[0-9.]+", text.strip())[0])  # type: ignore[index]  # the form above begins with a number
    return int(number * 1024 ** (" kmgtp".index((found[2] or " ").lower())))


def check_settings(
    settings: Settings, num_gpus: int, runs_here: Callable[[int], bool], root: Path = Path("/"), folder: Path = ENV.parent
) -> list[Check]:
    """Return one row for each problem of the settings, or one row that says that there is none.

    Args:
        settings: of the user.
        num_gpus: of this host.
        runs_here: returns whether a service of this project already uses a port.
        root: the folder with `proc`.
        folder: holds the Compose files and the files of the services.
    """
    declared = read_declarations(folder)
    files = (*folder.glob("docker-compose*.yml"), *folder.glob("env/settings/*.yml"))
    known = {one.name for one in declared}.union(*(_PASSED_ON.findall(path.read_text(encoding="utf-8")) for path in files))
    rows = [*_lines(settings.file, settings.problems)]
    checked: set[tuple[str, str]] = set()
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("docker-compose*.yml")))
    context = _Context(settings, num_gpus, runs_here, root, folder, declared, text)
    for one in declared:
        kind = next((check for form, check in _KINDS if re.search(form.replace("NAME", rf"\$\{{{one.name}\b"), one.line)), None)
        kind = kind or (_integer if re.fullmatch(r"-?[0-9]+", one.default) else None)
        is_used = one.name in settings.values or one.file == "docker-compose.yml"
        value = settings.get(one.name, one.default)
        if kind and is_used and "$" not in value and (one.name, kind.__name__) not in checked:
            checked.add((one.name, kind.__name__))
            rows += kind(one.name, value, context)
    rows += [*_gpus(context), *_compose_own(context), *_unknown(context, known)]
    return rows or [Check("settings", f"{len(settings.written)} variables in {settings.file}, all known and valid")]


@dataclass(frozen=True)
class _Context:
    settings: Settings
    num_gpus: int
    runs_here: Callable[[int], bool]
    root: Path
    folder: Path
    declared: list[Declaration]
    text: str
    """All Compose files together."""


def _row(name: str, found: str, needed: str, remedy: str, severity: Severity = Severity.ERROR) -> Check:
    return Check(name, found, severity, needed, remedy)


def _lines(file: str, problems: Iterable[str]) -> Iterator[Check]:
    return (
        _row(Path(file).name, problem, "NAME=VALUE lines with closed quotes", f"correct the line in {file}") for problem in problems
    )


def _set(name: str, example: str) -> str:
    return f"set {name} in .env to such a value ({name}={example}), or remove the line"


def _size(name: str, value: str, context: _Context) -> Iterator[Check]:
    size = bytes_of(value)
    if size is None:
        yield _row(name, f"{name}={value} is no size", "a number with b, k, m or g after it", _set(name, "2gb"))
    elif f"mem_limit: ${{{name}" in context.text and size:
        total = _memory_bytes(context.root)
        if size < _LEAST_MEMORY_BYTES:
            yield _row(name, f"{name}={value} is too small for PyTorch", "1g or more, or 0 for no limit", _set(name, "64g"))
        elif total and size > total:
            found, remedy = f"{name}={value}, but this machine has {format_bytes(total)}", _set(name, f"{total >> 30}g")
            yield _row(name, found, "less than the memory of this machine", remedy, Severity.WARNING)
    elif f"shm_size: ${{{name}" in context.text and size < NEEDED_SHM_BYTES:
        found, needed = f"{name}={value} is too small for several GPUs", f"{format_bytes(NEEDED_SHM_BYTES)} or more"
        yield _row(name, found, needed, _set(name, "2gb"), Severity.WARNING)


def _memory_bytes(root: Path) -> int:
    try:
        found = re.search(r"MemTotal: +([0-9]{1,15}) kB", (root / "proc/meminfo").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def _duration(name: str, value: str, context: _Context) -> Iterator[Check]:
    if not _DURATION.fullmatch(value):
        yield _row(name, f"{name}={value} is no duration", "numbers with h, m or s after them", _set(name, "120s"))
        return
    parts = re.findall(r"([0-9.]+)([a-zµ]+)", value)
    seconds = sum(float(number) * _SECONDS.get(unit, 0.0) for number, unit in parts)
    saving = context.settings.get("PET_SHUTDOWN_TIMEOUT", "60")
    if saving.isdecimal() and seconds <= int(saving[:9]):
        found = f"{name}={value}, but the ranks may take {saving} s to save (PET_SHUTDOWN_TIMEOUT)"
        yield _row(name, found, f"more than {saving} s", _set(name, "120s"), Severity.WARNING)


def _port(name: str, value: str, context: _Context) -> Iterator[Check]:
    if not value.isdecimal() or not 1 <= int(value[:6]) <= _LAST_PORT:
        yield _row(name, f"{name}={value} is no port", f"a number from 1 to {_LAST_PORT}", _set(name, "6007"))
        return
    try:
        socket.create_server(("127.0.0.1", int(value))).close()
    except PermissionError:
        return  # the engine may listen there
    except OSError:
        if not context.runs_here(int(value)):
            found = f"port {value} ({name}) is used by another program"
            yield _row(name, found, "a free port on 127.0.0.1", f"set {name} in .env to another port", Severity.WARNING)


def _restart(name: str, value: str, _: _Context) -> Iterator[Check]:
    if not re.fullmatch(r"no|on-failure(?::[0-9]{1,6})?", value):
        found = f"{name}={value} is unknown, or would start a finished run again"
        yield _row(name, found, "no, or on-failure:N", _set(name, "on-failure:3"))


def _integer(name: str, value: str, _: _Context) -> Iterator[Check]:
    is_user = name.endswith(("UID", "GID"))
    if not re.fullmatch(r"-1|[0-9]{1,18}", value) or (is_user and not 0 <= int(value) <= _LAST_ID):
        yield _row(name, f"{name}={value} is no number", "a whole number", _set(name, "1000"))


def _folder(name: str, value: str, context: _Context) -> Iterator[Check]:
    row, path = f"{name.removesuffix('_DIR').lower()} folder", context.folder / Path(value).expanduser()
    needed = f"a folder ({name}) that the user of the services can read"
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist, so it is not a folder"
        yield _row(row, f"{value} {state}", needed, f"set {name} in .env to an existing folder, or create it: mkdir -p {value}")
        return
    user, group = (context.settings.number(one, IMAGE_USER) for one in ("RUN_UID", "RUN_GID"))
    if blocked := next((one for one in _visited(path) if not _can_read(one, user, group)), None):
        found = f"{blocked} cannot be read by user {user} (RUN_UID)"
        remedy = f"chmod -R a+rX {value}; or set RUN_UID and RUN_GID in .env to the owner of the files"
        yield _row(row, found, needed, remedy)


def _visited(path: Path) -> Iterator[Path]:
    """Yield a folder and its first entries, as far as this user can see them."""
    yield path
    number = 0
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            yield Path(folder, name)
            if (number := number + 1) >= _MOST_VISITED:
                return


def _can_read(path: Path, user: int, group: int) -> bool:
    """Return whether the mode lets a user read a file or folder. The services have no capabilities, so root is as any user."""
    try:
        status = path.stat()
    except OSError:
        return True  # a broken link, or below a folder that is reported itself
    shift = 6 if status.st_uid == user else 3 if status.st_gid == group else 0
    needed = 5 if stat.S_ISDIR(status.st_mode) else 4
    return (status.st_mode >> shift) & needed == needed


def _file(name: str, value: str, context: _Context) -> Iterator[Check]:
    path = context.folder / Path(value).expanduser()
    if not path.is_file() or not os.access(path, os.R_OK):
        found = f"{name}={value} is not a file that can be read"
        yield _row(name, found, "a readable file", f"correct {name} in .env, or remove the line")


def _command(name: str, value: str, _: _Context) -> Iterator[Check]:
    try:
        shlex.split(value)
    except ValueError as error:
        found = f"{name} cannot be split into words: {str(error).lower()}"
        yield _row(name, found, "options with closed quotes", f"close the quote in {name}")


def _recipe(name: str, value: str, _: _Context) -> Iterator[Check]:
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    if value and value not in ("auto", "none", *names) and not value.endswith(".toml"):
        found = f"{name}={value} is not in env/recipes"
        yield _row(name, found, f"auto, {', '.join(names)}", f"correct {name} in .env{_like(value, names)}")


def _place(name: str, value: str, _: _Context) -> Iterator[Check]:
    parts = value.split("/")
    if {"", ".", ".."} & set(parts) or (name.startswith("DATA") and len(parts) > 1):
        yield _row(name, f"{name}={value} is not the name of a folder", "a name without . and .. between /", _set(name, "demo"))


def _volume(name: str, value: str, context: _Context) -> Iterator[Check]:
    if value.startswith((".", "/", "~")):
        path = context.folder / Path(value).expanduser()
        if path.exists() and not path.is_dir():
            yield _row(name, f"{name}={value} is a file", "a folder", f"set {name} to a folder")
        elif not path.exists():
            remedy = f"mkdir -p {value}, as the user with the id RUN_UID"
            yield _row(
                name, f"{value} does not exist, and the engine would create it for root", "a folder", remedy, Severity.WARNING
            )
        return
    tables = re.findall(r"^volumes:\n((?: .*\n?)+)", context.text, re.MULTILINE)
    volumes = [found for table in tables for found in re.findall(r"^  ([\w.-]+):$", table, re.MULTILINE)]
    if value not in volumes:
        remedy = f"for a folder write {name}=./{value}; for the volume remove the line"
        yield _row(
            name, f"{name}={value} is no volume of the Compose files, and no path", f"{', '.join(volumes)}, or a path", remedy
        )


def _image(name: str, value: str, _: _Context) -> Iterator[Check]:
    if value and not _IMAGE.fullmatch(value):
        found, needed = f"{name}={value} is not the name of an image", "NAME[:TAG][@sha256:DIGEST], lower case"
        yield _row(name, found, needed, f"correct {name} in .env, or remove the line")


_KINDS: tuple[tuple[str, Callable[[str, str, _Context], Iterator[Check]]], ...] = (
    (r"(?:mem_limit|shm_size): NAME|size=NAME", _size),
    (r"stop_grace_period: NAME", _duration),
    (r"127\.0\.0\.1:NAME", _port),
    (r"restart: NAME", _restart),
    (r"source: \"?NAME", _folder),
    (r"\bfile: NAME", _file),
    (r"command: NAME", _command),
    (r"_RECIPE: .*NAME", _recipe),
    (r"/workspace/\w+/NAME", _place),
    (r"^- NAME.*:/workspace", _volume),
    (r"(?:image|BASE_IMAGE): NAME", _image),
)
"""Form of a line of a Compose file that uses a setting (NAME), and the check of its value."""


def _gpus(context: _Context) -> Iterator[Check]:
    gpus, ids = context.settings.get("GPUS", "all"), context.settings.get("GPU_IDS")
    known = re.findall(r"^  gpus-(\w+):", context.text, re.MULTILINE)
    if gpus not in known:
        remedy = "set GPUS in .env to all, none or a number; GPU_IDS=0,3 chooses GPUs"
        yield _row("GPUS", f"GPUS={gpus} is unknown", f"one of {', '.join(known)}", remedy)
    elif gpus.isdecimal() and int(gpus) > context.num_gpus:
        remedy = f"set GPUS in .env to {'all' if context.num_gpus else 'none'}"
        yield _row("GPUS", f"GPUS={gpus}, but this machine has {context.num_gpus} GPUs", f"{context.num_gpus} or less", remedy)
    if not ids:
        return
    if not _GPU_IDS.fullmatch(ids):
        needed = "indexes or UUIDs of nvidia-smi -L, with commas between them"
        yield _row(
            "GPU_IDS", f"GPU_IDS={ids} is no list of GPUs", needed, "correct GPU_IDS in .env (GPU_IDS=0,3), or remove the line"
        )
    elif missing := [one for one in ids.split(",") if one.isdecimal() and int(one) >= context.num_gpus]:
        found = f"GPU_IDS={ids}, but this machine has {context.num_gpus} GPUs, so there is no GPU {missing[0]}"
        yield _row("GPU_IDS", found, "indexes of nvidia-smi -L", "correct GPU_IDS in .env, or remove the line")
    if gpus != "all":
        yield _row(
            "GPU_IDS", f"GPU_IDS={ids} and GPUS={gpus} are both set", "one of them", "remove GPUS from .env, or set GPUS=all"
        )


def _compose_own(context: _Context) -> Iterator[Check]:
    separator = context.settings.get("COMPOSE_PATH_SEPARATOR", ":")
    for name in filter(None, context.settings.get("COMPOSE_FILE").split(separator)):
        if not (context.folder / name).is_file():
            needed = f"existing files with {separator} between them"
            yield _row("COMPOSE_FILE", f"{name} does not exist", needed, "correct COMPOSE_FILE, or remove the line")
    project = context.settings.get("COMPOSE_PROJECT_NAME")
    if project and not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", project):
        found, needed = f"COMPOSE_PROJECT_NAME={project} is no name of a project", "lower-case letters, digits, - and _"
        yield _row("COMPOSE_PROJECT_NAME", found, needed, _set("COMPOSE_PROJECT_NAME", "trainer"))


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
