"""What a process runs on and with, and how that differs from what another one ran on and with."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from common.files import digest_file

__all__ = ["Difference", "environment_facts", "find_differences", "flattened", "from_cpuinfo"]

_LOCKS = Path(__file__).resolve().parents[2] / "env"
_CPUINFO = Path("/proc/cpuinfo")
_CHANGES_BITS = {"device", "torch", "threads", "attention", "cuda", "gpus", "processor", "image", "code"}
_CHANGES_BITS_BELOW = ("flags.", "packages.torch", "packages.triton", "packages.nvidia-", "packages.mkl")


@dataclass(frozen=True)
class Difference:
    """Something that is not as it was."""

    name: str
    recorded: Any
    found: Any
    changes_bits: bool
    """The same steps may have other bits because of it."""

    def describe(self) -> str:
        """The difference in a line; a star marks one that can change bits."""
        return f"{'*' if self.changes_bits else ' '} {self.name}: {_short(self.recorded)} then, {_short(self.found)} now"


def find_differences(
    recorded: Mapping[str, Any], found: Mapping[str, Any], deciding: Collection[str] = ()
) -> tuple[Difference, ...]:
    """What is not the same in both, by name; `deciding` are names that change bits, whatever they are."""
    certain = {*_CHANGES_BITS, *deciding}
    return tuple(
        Difference(name, recorded.get(name), found.get(name), name in certain or name.startswith(_CHANGES_BITS_BELOW))
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    )


def environment_facts() -> dict[str, Any]:
    """What this process runs on and with, by name."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": _packages(),
        "locks": {path.name: digest_file(path) for path in sorted(_LOCKS.glob("requirements*.lock"))},
        "processor": next(iter(from_cpuinfo("model name")), platform.machine()),
        "platform": platform.platform(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "image": os.environ.get("IMAGE_REVISION"),
        "code": os.environ.get("CODE_REVISION") or _git_revision(),
    }


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their full names, with dots between: `{"torch.version": …}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


@cache
def _packages() -> dict[str, str]:
    # What an installer has left half-removed has no name.
    return {name.lower(): found.version for found in distributions() if (name := found.metadata["Name"])}


def from_cpuinfo(*names: str) -> list[str]:
    """What Linux says of the CPUs under these names, each value once; nothing on other systems."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith(names)))


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
