"""The environment of a process: hardware, versions and code; and the differences between two environments."""

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
    """A fact whose recorded and found values differ."""

    name: str
    recorded: Any
    found: Any
    changes_bits: bool
    """True if the same steps may compute other bits because of this."""

    def describe(self) -> str:
        """Return the difference as one line. A star marks a difference that can change bits."""
        return f"{'*' if self.changes_bits else ' '} {self.name}: {_short(self.recorded)} before, {_short(self.found)} now"


def find_differences(
    recorded: Mapping[str, Any], found: Mapping[str, Any], deciding: Collection[str] = ()
) -> tuple[Difference, ...]:
    """Return the facts that differ, sorted by name. `deciding` holds further names that change bits."""
    certain = {*_CHANGES_BITS, *deciding}
    return tuple(
        Difference(name, recorded.get(name), found.get(name), name in certain or name.startswith(_CHANGES_BITS_BELOW))
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    )


def environment_facts() -> dict[str, Any]:
    """Return the environment of this process: facts by name."""
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
    """Return nested values by their full names, joined with dots: `{"torch.version": …}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


@cache
def _packages() -> dict[str, str]:
    # A half-removed package has no name.
    return {name.lower(): found.version for found in distributions() if (name := found.metadata["Name"])}


def from_cpuinfo(*names: str) -> list[str]:
    """Return the values of these fields in /proc/cpuinfo, each once. Empty on systems other than Linux."""
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
