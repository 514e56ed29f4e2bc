"""Checks of the settings of Compose: `.env`, the shell, and the files of the services. Standard library and `common` alone.

The names come from the Compose files, so a new setting needs no entry here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from common.paths import ENV
from trainer.doctor.check import Check, Severity, check
from trainer.doctor.inputs import read_variables

_USED = re.compile(r"\$\{([A-Z][A-Z0-9_]*)(?::?-([^}$]*))?")
_PASSED_ON = re.compile(r"^ *([A-Z][A-Z0-9_]*):", re.MULTILINE)
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_GPU_IDS = re.compile(r"(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9a-fA-F/-]+)(?:,(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9a-fA-F/-]+))*")
_OF_COMPOSE = ("COMPOSE_", "DOCKER_", "BUILDKIT_", "BUILDX_")
IMAGE_USER = 1000  # user and group of the image
_FOR_SERVICES = {"train.env": "TRAIN_", "prepare.env": "PREP_"}
_ALL_SETTINGS = "all settings: docs/reference/settings.md"


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


def read_defaults(folder: Path = ENV.parent) -> dict[str, str]:
    """Return the default of each setting that the Compose files use."""
    lines = [
        line
        for path in sorted(folder.glob("docker-compose*.yml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    return {used[1]: (used[2] or "").strip('"') for line in lines for used in _USED.finditer(line)}


@check("settings", "host")
def check_settings(settings: Settings, num_gpus: int, folder: Path = ENV.parent) -> list[Check]:
    """Return one row for each problem of the settings, or one row that says that there is none.

    A name without effect is a problem, and a value that loses work. Compose, the engine or a command says of other values that it
    cannot use them.
    """
    used = read_defaults(folder)
    files = (*folder.glob("docker-compose*.yml"), *folder.glob("env/settings/*.yml"))
    known = used.keys() | {name for path in files for name in _PASSED_ON.findall(path.read_text(encoding="utf-8"))}
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("docker-compose*.yml")))
    rows = [
        *_lines(settings.file, settings.problems),
        *_grace_period(settings, used["STOP_GRACE_PERIOD"]),
        *_gpus(settings, num_gpus, text),
        *_unknown(settings, folder, set(used), known),
    ]
    return rows or [Check("settings", f"{len(settings.written)} variables in {settings.file}, all known")]


def _row(name: str, found: str, needed: str, remedy: str, severity: Severity = Severity.ERROR) -> Check:
    return Check(name, found, severity, needed, remedy)


def _lines(file: str, problems: Iterable[str]) -> Iterator[Check]:
    return (
        _row(Path(file).name, problem, "NAME=VALUE lines with closed quotes", f"correct the line in {file}") for problem in problems
    )


def _grace_period(settings: Settings, default: str) -> Iterator[Check]:
    value, saving = settings.get("STOP_GRACE_PERIOD", default), settings.number("PET_SHUTDOWN_TIMEOUT", 60)
    parts = _DURATION.findall(value)
    if "".join(map("".join, parts)) == value and sum(float(number) * _SECONDS[unit] for number, unit in parts) <= saving:
        found = f"STOP_GRACE_PERIOD={value}, but the ranks may take {saving} s to save (PET_SHUTDOWN_TIMEOUT)"
        remedy = f"set STOP_GRACE_PERIOD={2 * saving}s in .env"
        yield _row("STOP_GRACE_PERIOD", found, f"more than {saving} s, such as {2 * saving}s", remedy, Severity.WARNING)


def _gpus(settings: Settings, here: int, text: str) -> Iterator[Check]:
    gpus, ids = settings.get("GPUS", "all"), settings.get("GPU_IDS")
    known, remedy = re.findall(r"^  gpus-(\w+):", text, re.MULTILINE), "correct GPUS in .env; GPU_IDS=0,3 chooses GPUs"
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


def _unknown(settings: Settings, folder: Path, used: Set[str], known: Set[str]) -> Iterator[Check]:
    """Yield a row for each name that has no effect. Values are not shown, because they may be secrets."""
    for name in settings.values:
        is_ours = name in settings.written or name.startswith(tuple(_FOR_SERVICES.values()))
        if is_ours and name not in known and not name.startswith(_OF_COMPOSE):
            place = settings.file if name in settings.written else "the shell"
            remedy = f"correct the name{_like(name, known)}, or put it into train.env or prepare.env; {_ALL_SETTINGS}"
            yield _row(name, f"{name} in {place} has no effect", "a known name", remedy, Severity.WARNING)
    for file, prefix in _FOR_SERVICES.items():
        values, problems = read_variables(folder / file)
        yield from _lines(file, problems)
        for name in values:
            if name in used:
                found, remedy = f"{name} has no effect in {file}", f"move the line to {settings.file}"
                yield _row(name, found, f"{name} in .env", remedy, Severity.WARNING)
            elif name.startswith(prefix) and name not in known:
                remedy = f"correct the name{_like(name, known)}; {_ALL_SETTINGS}"
                yield _row(name, f"{name} in {file} is not a setting", "a known name", remedy)


def _like(name: str, known: Set[str]) -> str:
    similar = difflib.get_close_matches(name, sorted(known), 1)
    return f": perhaps {similar[0]}" if similar else ""
