"""`make doctor`: checks the host of the containers. It needs Python 3.11 and its standard library alone.

env/doctor [--fast] [--json]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.command_line import end_at_once, run_command
from trainer.distributed.gpu_signs import signs_of_gpus
from trainer.doctor.check import Check, Severity, refuse_errors, write_checks
from trainer.doctor.disk import check_disk, check_space, read_disk, with_rates
from trainer.doctor.engine import check_engine, check_gpu_container, read_engine, start_gpu_container
from trainer.doctor.gpu import check_gpus, check_links, read_gpus
from trainer.doctor.programs import Runner, run_program
from trainer.doctor.versions import read_needs, read_variables

__all__ = ["check_workspace", "host_checks", "main"]

_IMAGE_USER = 1000
_ENGINE_FOLDER = Path("/var/lib/docker")
"""Where an engine keeps its images and volumes, unless it is configured otherwise."""
_CONTAINER_TIMEOUT_S = 60.0


def host_checks(variables: Mapping[str, str], run: Runner, root: Path = Path("/"), *, fast: bool) -> list[Check]:
    """Return the rows of this host.

    Args:
        variables: those of Compose: `.env`, and the environment, which has priority.
        run: runs a program.
        root: the folder with `dev`, `etc`, `proc` and `var`.
        fast: leaves out what takes more than three seconds: rates of disks, and a container with GPUs.
    """
    needs, engine = read_needs(), read_engine(run, root)
    gpus = read_gpus(run, signs_of_gpus(root))
    wanted = variables.get("GPUS", "") != "none"
    has_gpus = wanted and bool(gpus.gpus or gpus.signs)
    rows = [*check_engine(engine, needs, has_gpus=has_gpus), *check_gpus(gpus, needs, wanted=wanted), *check_links(gpus)]
    if engine.passes_gpus and has_gpus and not fast:
        image = variables.get("IMAGE") or run(("docker", "compose", "config", "--images")).text.partition("\n")[0]
        started = start_gpu_container(run, image)
        if started is not None:
            rows.append(check_gpu_container(started))
    return rows + check_workspace(variables, fast=fast)


def check_workspace(variables: Mapping[str, str], *, fast: bool) -> list[Check]:
    """Return the rows of the folders that Compose mounts: the volume, if it is a folder of the host, and the text."""
    rows = []
    workspace = variables.get("WORKSPACE", "")
    if "/" in workspace:
        path = Path(workspace)
        reading = read_disk("workspace", path, writes=True)
        reading = reading if fast else with_rates(reading, writes=True)
        rows += check_disk(reading, writes=True)
        user = _number(variables.get("RUN_UID", ""), _IMAGE_USER)
        group = _number(variables.get("RUN_GID", ""), _IMAGE_USER)
        by_group = reading.owner_group == group and reading.mode & 0o020
        if path.is_dir() and reading.owner != user and not by_group and not reading.mode & 0o002:
            remedy = f"sudo chown -R {user}:{group} {path}"
            if reading.owner != 0:
                remedy += f"; or set RUN_UID={reading.owner} and RUN_GID={reading.owner_group} in .env"
            found = f"{path} belongs to user {reading.owner}, group {reading.owner_group}, mode {reading.mode:03o}"
            rows.append(Check("volume owner", found, Severity.ERROR, f"user {user} (RUN_UID), which runs the services", remedy))
    else:
        rows.append(check_space(read_disk("engine", _ENGINE_FOLDER, writes=False)))
    text = Path(variables.get("TEXT_DIR") or "text")
    if not text.is_dir():
        remedy = "set TEXT_DIR in .env to the folder that holds your text"
        rows.append(Check("text folder", f"{text} is not a folder", Severity.ERROR, "a folder (TEXT_DIR)", remedy))
    return rows


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default


def main(words: Sequence[str]) -> None:
    """Print the rows of this host.

    Raises:
        ConfigError: a row is an error.
    """
    parser = argparse.ArgumentParser(
        "env/doctor", description="Checks this host for the containers: engine, Compose, GPUs, folders."
    )
    parser.add_argument("--fast", action="store_true", help="skip the checks that take more than three seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(words)
    variables = {**read_variables(Path(os.environ.get("ENV_FILE") or ".env")), **os.environ}
    rows = host_checks(variables, lambda command: run_program(command, _CONTAINER_TIMEOUT_S), fast=options.fast)
    write_checks(rows, sys.stdout, as_json=options.json)
    refuse_errors(rows)


if __name__ == "__main__":
    end_at_once(run_command(main, sys.argv[1:]))
