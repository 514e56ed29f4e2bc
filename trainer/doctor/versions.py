"""The versions that a training needs, and checks of the installed ones: the lock, PyTorch. Standard library alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.paths import ENV
from trainer.doctor.check import Check, Severity, check
from trainer.doctor.env_file import read_variables
from trainer.machine.locks import describe_unlocked

_INSTALL = "install the lock: env/make-venv .venv; in containers build the image again: make image"
_LIBRARIES = {"TORCH_VERSION": "torch", "CUDA_VERSION": "cuda", "NCCL_VERSION": "nccl", "CUDNN_VERSION": "cudnn"}
"""Names of versions.env, and of the same versions in the environment of a run."""


@dataclass(frozen=True)
class Needs:
    compose: str
    cuda: str  # the CUDA version of the image
    drivers: dict[str, str]  # the lowest driver, by the major version of CUDA
    versions: dict[str, str]  # the lines of versions.env: TORCH_VERSION, CUDA_VERSION, NCCL_VERSION, CUDNN_VERSION

    def driver(self, cuda: str | None = None) -> str:
        """Return the lowest driver for a CUDA version such as `13.0`, that of the image by default; empty if it is unknown."""
        return self.drivers.get((cuda or self.cuda).partition(".")[0], "")


def read_needs(folder: Path = ENV) -> Needs:
    versions, host = (read_variables(folder / name)[0] for name in ("versions.env", "host.env"))
    drivers = {name.removeprefix("DRIVER_FLOOR_"): value for name, value in host.items() if name.startswith("DRIVER_FLOOR_")}
    return Needs(host.get("COMPOSE_FLOOR", ""), versions.get("CUDA_VERSION", ""), drivers, versions)


def at_least(floor: str, found: str) -> bool:
    return _parts(found) >= _parts(floor)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


@check("versions", "machine")
def check_versions(libraries: Mapping[str, str | None], needs: Needs) -> Check:
    shown = ", ".join(f"{name} {version}" for name, version in libraries.items() if version)
    different = []
    for name, own in _LIBRARIES.items():
        wanted, version = needs.versions.get(name), libraries.get(own)
        if wanted and version and version.partition("+")[0] != wanted:
            different.append(f"{own} {wanted}")
    if different:
        return Check("versions", shown, Severity.WARNING, ", ".join(different), _INSTALL)
    return Check("versions", shown)


@check("versions", "machine")
def check_lock(lock: str | None, unlocked: Mapping[str, str]) -> Check:
    if found := describe_unlocked(lock, unlocked):
        return Check("packages", found, Severity.WARNING, "the versions of the lock, so that runs can be repeated", _INSTALL)
    return Check("packages", f"all as in env/{lock}")
