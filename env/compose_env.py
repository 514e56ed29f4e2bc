"""Writes the files that name the variables that docker-compose.yml passes on (`make compose-env`).

Compose passes on only the variables that it is told, from the shell or from .env. docker-compose.yml extends the services of these
files, so it need not list hundreds of names. The two packages print the names of their settings with `schema --env`.
tests/containers/test_static.py fails if a file and its package differ.
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
)
"""Variables of the processes of a training."""

__all__ = ["SERVICES", "content", "file_of", "main"]


def file_of(service: str) -> Path:
    """Return the file of a service."""
    return ROOT / "env" / "settings" / f"{service}.yml"


def content(service: str) -> str:
    """Return the file of a service: its settings in the order of the package, without those that docker-compose.yml sets itself."""
    command = [sys.executable, "-m", SERVICES[service], "schema", "--env"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    compose = COMPOSE.read_text(encoding="utf-8")
    listed = [name for name in names if not re.search(rf"^ *{name}:", compose, re.MULTILINE)]
    head = ["# Made by `make compose-env`; do not edit.", "services:", f"  {service}:", "    environment:"]
    return "\n".join([*head, *(f"      {name}:" for name in (*(OF_RANKS if service == "train" else ()), *listed)), ""])


def main() -> int:
    """Write both files."""
    for service in SERVICES:
        file_of(service).write_text(content(service), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
