"""`make doctor`: checks the host of the containers. It needs Python 3.11 and its standard library alone.

The checks of this module are those of the container engine: engine, Compose, NVIDIA Container Toolkit, and containers.

env/doctor [--fast] [--json]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.command_line import end_at_once, run_command
from common.hardware import signs_of_gpus
from trainer.doctor.check import Check, Severity, check, refuse_errors, rows_of, write_checks
from trainer.doctor.disk import check_disk, check_space, read_disk
from trainer.doctor.gpu import read_gpus
from trainer.doctor.host_settings import IMAGE_USER, Settings, read_defaults, read_settings
from trainer.doctor.inputs import Needs, Runner, at_least, read_needs, run_program

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
