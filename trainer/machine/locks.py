"""Compares the installed packages with the lock that they should have been installed from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions

from common.paths import ENV

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)[ \t]*(;[^\\\n]*)?", re.MULTILINE)
_MOST_NAMED = 8


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
