"""`make doctor`: checks the host of the containers. It needs Python 3.11 and its standard library alone.

env/doctor [--fast] [--json]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from common.command_line import end_at_once, run_command
from common.hardware import signs_of_gpus
from common.paths import ENV
from trainer.doctor.check import Check, Severity, check, refuse_errors, rows_of, write_checks
from trainer.doctor.disk import check_disk, check_space, read_disk
from trainer.doctor.engine import (
    EngineReading,
    check_base_image,
    check_engine_limits,
    check_gpu_container,
    read_engine,
)
from trainer.doctor.gpu import read_gpus
from trainer.doctor.host_settings import IMAGE_USER, Settings, read_declarations, read_settings
from trainer.doctor.inputs import Runner, read_needs, run_program

_STAND_IN = "trainer-base:"
"""Begins the name of the image that `make up` builds if the registry of the base image cannot be reached."""
_LIMIT = "ULIMIT_"  # begins the name of a setting with a limit that the Compose files raise for GPUs
_ENGINE_FOLDER = Path("/var/lib/docker")  # where an engine keeps its images and volumes, unless it is configured otherwise
_CONTAINER_TIMEOUT_S = 60.0


def host_checks(settings: Settings, run: Runner, root: Path = Path("/"), *, fast: bool) -> list[Check]:
    """Return the rows of this host. `fast` leaves out what takes more than three seconds."""
    gpus = read_gpus(run, signs_of_gpus(root))
    wanted = settings.get("GPUS") != "none"

    def runs_here(port: int) -> bool:
        own = f"label=com.docker.compose.project.working_dir={ENV.parent}"
        return bool(run(("docker", "ps", "--quiet", "--filter", f"publish={port}", "--filter", own)).text)

    facts = {
        "settings": settings,
        "run": run,
        "fast": fast,
        "needs": read_needs(),
        "engine": read_engine(run, root),
        "gpus": gpus,
        "num_gpus": len(gpus.gpus),
        "wanted": wanted,
        "has_gpus": wanted and bool(gpus.gpus or gpus.signs),
        "runs_here": runs_here,
    }
    return rows_of("host", facts, fast=fast)


@check("containers", "host", is_slow=True)
def check_containers(settings: Settings, run: Runner, engine: EngineReading, *, has_gpus: bool) -> list[Check]:
    """Return the rows that need an image. Without an image no container is started."""
    if engine.error or not engine.has_program:
        return []
    declared = {one.name: one for one in read_declarations()}
    image = settings.get("IMAGE") or run(("docker", "compose", "config", "--images")).text.partition("\n")[0]
    is_built = bool(image) and run(("docker", "image", "inspect", "--format", "{{.Id}}", image)).code == 0
    base = settings.get("BASE_IMAGE", declared["BASE_IMAGE"].default)
    rows = [] if base.startswith(_STAND_IN) else check_base_image(run, base, is_built=is_built)
    if is_built:
        raised = [name for name in declared if name.startswith(_LIMIT) and settings.get("GPUS") != "none"]
        limits = {name.removeprefix(_LIMIT).lower(): settings.get(name, declared[name].default) for name in raised}
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
