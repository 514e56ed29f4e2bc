"""`make doctor`: checks the host of the containers. It needs Python 3.11 and its standard library alone.

The checks of this module are those of the container engine: engine, Compose and its settings, NVIDIA Container Toolkit, and
containers.

env/doctor [--fast] [--json]
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from common.command_line import end_at_once, run_command
from common.hardware import signs_of_gpus
from common.paths import ENV
from trainer.doctor.check import Check, Severity, check, refuse_errors, rows_of, write_checks
from trainer.doctor.disk import check_disk, check_space, read_disk
from trainer.doctor.gpu import read_gpus
from trainer.doctor.inputs import Needs, Runner, at_least, read_needs, read_variables, run_program

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


_CDI_FOLDERS = ("etc/cdi", "var/run/cdi")
_INSTALL = "on Debian: env/install-docker.sh; elsewhere follow https://docs.docker.com/engine/install. Without an engine: make demo"
_TOOLKIT = (
    "install the NVIDIA Container Toolkit (package nvidia-container-toolkit), then: sudo nvidia-ctk runtime configure "
    "--runtime=docker && sudo systemctl restart docker; or train without GPUs: GPUS=none make up"
)
_CAUSES: tuple[tuple[str, str, str], ...] = (
    ("could not select device driver", "the engine knows no NVIDIA runtime", _TOOLKIT),
    (
        "driver/library version mismatch",
        "the loaded driver and its libraries differ",
        "restart the machine, because its driver was updated",
    ),
    (
        "nvidia-container-cli",
        "the NVIDIA Container Toolkit cannot use the driver",
        "run nvidia-smi on the host; if it works, restart the engine: sudo systemctl restart docker",
    ),
    ("unknown flag: --gpus", "the engine is older than 19.03", _INSTALL),
)
"""Parts of messages of `docker run --gpus`, with their cause and remedy."""


@dataclass(frozen=True)
class EngineReading:
    has_program: bool = True
    version: str = ""
    error: str = ""  # why it does not respond; empty if it does
    compose: str = ""  # version of Compose; empty if there is none
    passes_gpus: bool = False  # whether the engine has an nvidia runtime, or the machine a CDI description of its GPUs


def read_engine(run: Runner, root: Path = Path("/")) -> EngineReading:
    engine = run(("docker", "info", "--format", "{{.ServerVersion}}"))
    if engine.is_missing:
        return EngineReading(has_program=False)
    compose = run(("docker", "compose", "version", "--short"))
    found = compose.text.splitlines()[-1].strip().removeprefix("v") if compose.code == 0 and compose.text else ""
    if engine.code != 0 or not engine.text:
        return EngineReading(error=engine.error or engine.text or f"exit code {engine.code}, without a version", compose=found)
    runtimes = run(("docker", "info", "--format", "{{json .Runtimes}}")).text
    described = any(any((root / folder).glob("*nvidia*")) for folder in _CDI_FOLDERS)
    return EngineReading(version=engine.text, compose=found, passes_gpus=described or '"nvidia"' in runtimes)


@check("engine", "host")
def check_engine(engine: EngineReading, needs: Needs, *, has_gpus: bool) -> list[Check]:
    if not engine.has_program:
        return [Check("engine", "the program docker is not installed", Severity.ERROR, "a Docker engine", _INSTALL)]
    rows = [Check("engine", f"Docker {engine.version}")]
    if engine.error:
        remedy = "start it: sudo systemctl start docker, or on Debian env/install-docker.sh --start"
        if "permission denied" in engine.error.lower():
            remedy = "add your user to the group docker (sudo usermod -aG docker $USER), then log in again"
        rows = [Check("engine", f"it does not respond: {engine.error}", Severity.ERROR, "an engine that responds", remedy)]
    is_enough = bool(engine.compose) and at_least(needs.compose, engine.compose)
    remedy = "" if is_enough else f"{'update' if engine.compose else 'install'} the Compose plugin; {_INSTALL}"
    severity = Severity.OK if is_enough else Severity.ERROR
    rows.append(Check("Compose", engine.compose or "not found", severity, f"{needs.compose} or later", remedy))
    if has_gpus and not engine.error and engine.passes_gpus:
        rows.append(Check("NVIDIA toolkit", "the engine can pass GPUs to containers"))
    elif has_gpus and not engine.error:
        found, needed = "the engine has no nvidia runtime", "the nvidia runtime or CDI"
        rows.append(Check("NVIDIA toolkit", found, Severity.ERROR, needed, _TOOLKIT))
    return rows


def check_gpu_container(run: Runner, image: str) -> Check:
    needed = "a container sees all GPUs"
    seen = run(("docker", "run", "--rm", "--network", "none", "--gpus", "all", "--entrypoint", "nvidia-smi", image, "-L"))
    if seen.code == 0:
        number = sum(line.startswith("GPU ") for line in seen.text.splitlines())
        return Check("GPUs in container", f"{number} seen", needed=needed)
    said = f"{seen.text} {seen.error}".strip()
    cause, remedy = "", "start it by hand for the whole message: docker run --rm --gpus all --entrypoint nvidia-smi IMAGE"
    for part, known_cause, known_remedy in _CAUSES:
        if part in said.lower():
            cause, remedy = f"{known_cause}: ", known_remedy
            break
    return Check("GPUs in container", f"{cause}{said or f'exit code {seen.code}'}", Severity.ERROR, needed, remedy)


def check_engine_limits(run: Runner, image: str, limits: Mapping[str, str]) -> list[Check]:
    if not limits:
        return []
    options = (f"--ulimit={name}={value}" for name, value in limits.items())
    ended = run(("docker", "run", "--rm", "--network", "none", "--entrypoint", "true", *options, image))
    if ended.code == 0:
        return []
    asked = ", ".join(f"{name} {value}" for name, value in limits.items())
    remedy = "lower ULIMIT_MEMLOCK in .env to the limit of the engine; `make up` does it"
    found = f"a container does not start with {asked}: {ended.error or ended.text or f'exit code {ended.code}'}"
    return [Check("engine limits", found, Severity.ERROR, "limits that the engine may set", remedy)]


def check_base_image(run: Runner, base: str, *, is_built: bool) -> list[Check]:
    if run(("docker", "image", "inspect", "--format", "{{.Id}}", base)).code == 0:
        return []
    found = run(("docker", "buildx", "imagetools", "inspect", base))
    if found.code == 0:
        return []
    said = found.error or found.text or f"exit code {found.code}"
    remedy = "check proxy and login (docker login), or remove BASE_IMAGE from .env and run `make up`, which builds a stand-in"
    severity = Severity.WARNING if is_built else Severity.ERROR
    return [
        Check("base image", f"{base.partition('@')[0]} cannot be reached: {said}", severity, "a registry that responds", remedy)
    ]


_STAND_IN = "trainer-base:"
"""Begins the name of the image that `make up` builds if the registry of the base image cannot be reached."""
_LIMIT = "ULIMIT_"  # begins the name of a setting with a limit that the Compose files raise for GPUs
_ENGINE_FOLDER = Path("/var/lib/docker")  # where an engine keeps its images and volumes, unless it is configured otherwise
_CONTAINER_TIMEOUT_S = 60.0


def host_checks(settings: Settings, run: Runner, *, fast: bool) -> list[Check]:
    """Return the rows of this host. `fast` leaves out what takes more than three seconds."""
    gpus = read_gpus(run, signs_of_gpus())
    wanted = settings.get("GPUS") != "none"

    facts = {
        "settings": settings,
        "run": run,
        "fast": fast,
        "needs": read_needs(),
        "engine": read_engine(run),
        "gpus": gpus,
        "num_gpus": len(gpus.gpus),
        "wanted": wanted,
        "has_gpus": wanted and bool(gpus.gpus or gpus.signs),
    }
    return rows_of("host", facts, fast=fast)


@check("containers", "host", is_slow=True)
def check_containers(settings: Settings, run: Runner, engine: EngineReading, *, has_gpus: bool) -> list[Check]:
    """Return the rows that need an image. Without an image no container is started."""
    if engine.error or not engine.has_program:
        return []
    defaults = read_defaults()
    image = settings.get("IMAGE") or run(("docker", "compose", "config", "--images")).text.partition("\n")[0]
    is_built = bool(image) and run(("docker", "image", "inspect", "--format", "{{.Id}}", image)).code == 0
    base = settings.get("BASE_IMAGE", defaults["BASE_IMAGE"])
    rows = [] if base.startswith(_STAND_IN) else check_base_image(run, base, is_built=is_built)
    if is_built:
        raised = [name for name in defaults if name.startswith(_LIMIT) and settings.get("GPUS") != "none"]
        limits = {name.removeprefix(_LIMIT).lower(): settings.get(name, defaults[name]) for name in raised}
        rows += check_engine_limits(run, image, limits)
    if is_built and engine.passes_gpus and has_gpus:
        rows.append(check_gpu_container(run, image))
    return rows


@check("folders", "host")
def check_workspace(settings: Settings, *, fast: bool) -> list[Check]:
    workspace = settings.get("WORKSPACE")
    if "/" not in workspace:
        return [check_space(read_disk("engine", _ENGINE_FOLDER, writes=False))]
    path = Path(workspace)
    reading = read_disk("workspace", path, writes=True, measures=not fast)
    rows = check_disk(reading, writes=True)
    if not path.exists():
        found, remedy = f"{path} does not exist, and the engine would create it for root", f"mkdir -p {path}, as the user RUN_UID"
        rows.append(Check("WORKSPACE", found, Severity.WARNING, "a folder", remedy))
    user, group = (settings.number(name, IMAGE_USER) for name in ("RUN_UID", "RUN_GID"))
    by_group = reading.owner_group == group and reading.mode & 0o020
    if path.is_dir() and reading.owner != user and not by_group and not reading.mode & 0o002:
        remedy = f"sudo chown -R {user}:{group} {path}"
        if reading.owner != 0:
            remedy += f"; or set RUN_UID={reading.owner} and RUN_GID={reading.owner_group} in .env"
        found = f"{path} belongs to user {reading.owner}, group {reading.owner_group}, mode {reading.mode:03o}"
        rows.append(Check("volume owner", found, Severity.ERROR, f"user {user} (RUN_UID), which runs the services", remedy))
    return rows


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "env/doctor", description="Checks this host for the containers: engine, Compose, GPUs, folders."
    )
    parser.add_argument("--fast", action="store_true", help="skip the checks that take more than three seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(words)
    settings = read_settings(Path(os.environ.get("ENV_FILE") or ".env"), os.environ)
    rows = host_checks(settings, lambda command: run_program(command, _CONTAINER_TIMEOUT_S), fast=options.fast)
    write_checks(rows, sys.stdout, as_json=options.json)
    refuse_errors(rows)


if __name__ == "__main__":
    end_at_once(run_command(main, sys.argv[1:]))
