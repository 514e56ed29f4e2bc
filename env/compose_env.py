"""Writes the files that name the variables that docker-compose.yml passes on (`make compose-env`).

Compose passes on only the variables that it is told, from the shell or from .env. docker-compose.yml extends the services of these
files, so it need not list hundreds of names. The two packages print the names of their settings with `schema --env`.
tests/containers/test_static.py fails if a file and its package differ.

A name that neither the shell nor .env sets is removed from the service, even if the user's train.env or prepare.env sets it. So a
second file, which Compose reads after that of the user, puts all values into one variable, FROM_ENV_FILE: NAME=value for each, with
the ASCII character "unit separator" after it. entrypoints/environment takes from it the settings that the container lacks. So the
option -e of `docker compose run` has priority over the shell, the shell over .env, and .env over the file of the user.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
SERVICES = {"data-prep": "data_pipeline", "train": "trainer"}
OF_RANKS = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "TRAIN_MAX_RESTARTS",
    "TRAIN_RESTART_DELAY_S",
)
"""Variables of the processes of a training."""


def names(service: str) -> list[str]:
    """Return the settings of a service in the order of the package, without those that docker-compose.yml sets itself."""
    command = [sys.executable, "-m", SERVICES[service], "schema", "--env"]
    settings = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    compose = COMPOSE.read_text(encoding="utf-8")
    listed = [name for name in settings if not re.search(rf"^ *{name}:", compose, re.MULTILINE)]
    return [*(OF_RANKS if service == "train" else ()), *listed]


def files(service: str) -> dict[Path, str]:
    """Return the content of both files of a service."""
    head, passed_on = "# Made by `make compose-env`; do not edit.\n", names(service)
    lines = "".join(f"      {name}:\n" for name in passed_on)
    values = "".join(f"${{{name}+{name}=${{{name}-}}\x1f}}" for name in passed_on)
    folder = ROOT / "env" / "settings"
    return {
        folder / f"{service}.yml": f"{head}services:\n  {service}:\n    environment:\n{lines}",
        folder / f"{service}.env": f'{head}FROM_ENV_FILE="{values}"\n',
    }


def main() -> int:
    """Write the files of both services."""
    for service in SERVICES:
        for path, content in files(service).items():
            path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
