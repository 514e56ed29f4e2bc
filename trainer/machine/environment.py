"""The environment of a process: hardware, versions and code; and the differences between two environments."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from common.files import digest_file
from common.paths import ENV, SYSTEM_PACKAGES
from common.settings.dotted import flatten
from common.text import value_text
from trainer.machine.sampler import driver_version

_CPUINFO = Path("/proc/cpuinfo")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)[ \t]*(;[^\\\n]*)?", re.MULTILINE)
_MOST_NAMED = 8  # packages that differ from the lock, in one line
_CHANGES_BITS = {
    *("device", "torch", "threads", "attention", "kernels", "optimizer", "cuda", "gpus", "processor", "code", "nccl", "cudnn"),
    *("nodes", "image", "image_base", "system_packages"),  # the compiler that torch.compile calls is a system package
}
_CHANGES_BITS_BELOW = ("flags.", "packages.torch", "packages.triton", "packages.nvidia-", "packages.mkl")


@dataclass(frozen=True)
class ChangedFact:
    name: str
    recorded: Any
    found: Any
    changes_bits: bool  # True if the same steps may compute other bits because of this

    def describe(self) -> str:
        return f"{'*' if self.changes_bits else ' '} {self.name}: {shown(self.recorded)} before, {shown(self.found)} now"


def find_differences(
    recorded: Mapping[str, Any], found: Mapping[str, Any], deciding: Collection[str] = ()
) -> tuple[ChangedFact, ...]:
    certain = {*_CHANGES_BITS, *deciding}
    return tuple(
        ChangedFact(name, recorded.get(name), found.get(name), name in certain or name.startswith(_CHANGES_BITS_BELOW))
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    )


def environment_facts() -> dict[str, Any]:
    """Return the environment of this process by name. `image…` and `system_packages` are None outside of the image."""
    return {
        "python": platform.python_version(),
        **library_versions(),
        "driver": driver_version(),
        "packages": installed_packages(),
        "locks": {path.name: digest_file(path) for path in sorted(ENV.glob("requirements*.lock"))},
        "lock": lock_name(),
        "unlocked": unlocked_packages_here(),
        "processor": next(iter(from_cpuinfo("model name")), platform.machine()),
        "platform": platform.platform(),
        "waiting_threads": os.environ.get("OMP_WAIT_POLICY") or f"spins {os.environ.get('GOMP_SPINCOUNT', 'by default')}",
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "gpu_memory_bytes": [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())],
        "image": os.environ.get("IMAGE_REVISION"),
        "image_base": os.environ.get("IMAGE_BASE_DIGEST"),
        "image_digest": _image_digest(os.environ),
        "system_packages": digest_file(SYSTEM_PACKAGES) if SYSTEM_PACKAGES.is_file() else None,
        "code": os.environ.get("CODE_REVISION") or _git_revision(),
    }


def same_facts(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return recorded and found facts, flat, without those that an older version did not record or that follow from others."""
    common = (recorded.keys() & found.keys()) - {"unlocked", "lock"}
    older = {name: value for name, value in recorded.items() if name in common or name not in found}
    return flatten(older), flatten({name: value for name, value in found.items() if name in common})


def library_versions() -> dict[str, str | None]:
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else None,
        "nccl": nccl_version(),
    }


def nccl_version() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _image_digest(variables: Mapping[str, str]) -> str | None:
    """Return the digest in IMAGE_DIGEST (REVISION@sha256:…), which `make up` writes; None for another revision."""
    revision, _, digest = variables.get("IMAGE_DIGEST", "").rpartition("@")
    is_own = bool(revision) and revision == variables.get("CODE_REVISION")
    return digest if is_own and re.fullmatch(r"sha256:[0-9a-f]{64}", digest) else None


def from_cpuinfo(*names: str) -> list[str]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith(names)))


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, start_new_session=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def shown(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= 80 else text[:77] + "…"


# The installed packages, and the lock that they should have been installed from


def lock_name() -> str | None:
    name = "requirements-image.lock" if os.environ.get("IMAGE_REVISION") else "requirements.lock"
    return name if (ENV / name).is_file() else None


@cache
def installed_packages() -> dict[str, str]:
    """Return the version of each installed package by its name in lower case. The first one in the path of modules counts."""
    installed: dict[str, str] = {}
    for found in distributions():
        if name := found.metadata["Name"]:  # a half-removed package has none
            installed.setdefault(name.lower(), found.version)
    return installed


def unlocked_packages_here() -> dict[str, str]:
    lock = lock_name()
    return {} if lock is None else unlocked_packages((ENV / lock).read_text(encoding="utf-8"), installed_packages())


def unlocked_packages(lock: str, installed: Mapping[str, str]) -> dict[str, str]:
    """Return the packages that a lock has and that are missing or have none of its versions: both versions, by name."""
    versions = {_plain(name): version for name, version in installed.items()}
    pins: dict[str, list[str]] = {}
    for_some: set[str] = set()
    for name, version, marker in _PIN.findall(lock):
        pins.setdefault(_plain(name), []).append(version)
        if marker:
            for_some.add(_plain(name))
    unlocked = {}
    for name, wanted in pins.items():
        found = versions.get(name)
        if found is None and name in for_some:
            continue
        if found is None or (found not in wanted and found.partition("+")[0] not in wanted):
            unlocked[name] = f"{found or 'missing'} (lock: {' or '.join(wanted)})"
    return unlocked


def describe_unlocked(lock: str | None, unlocked: Mapping[str, str]) -> str:
    if lock is None:
        return "the lock env/requirements.lock is missing, so the installed packages were not compared with it"
    if not unlocked:
        return ""
    named = ", ".join(f"{name} {versions}" for name, versions in list(unlocked.items())[:_MOST_NAMED])
    more = f" and {len(unlocked) - _MOST_NAMED} more" if len(unlocked) > _MOST_NAMED else ""
    return f"{len(unlocked)} package{'s differ' if len(unlocked) > 1 else ' differs'} from env/{lock}: {named}{more}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
