"""Limits and environment of the programs that read files of strangers. Imports the standard library alone, to start fast."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

_OF_THE_PROGRAM_BYTES = 1 << 30  # address space that a program has mapped before it reads its first file


def child_environment() -> dict[str, str]:
    """Return the variables that a program needs to start and to import this project. None of them can hold credentials."""
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
    return environment | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parents[1])])}


def forbid_files() -> None:
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_FSIZE, 0)


def lower_limit(kind: int, wanted: int) -> None:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (_least(soft, wanted), _least(hard, wanted)))


def limit_memory(more_bytes: int) -> None:
    """Limit the address space of this process to what it uses now and `more_bytes`. Only Linux says how much it uses."""
    if (in_use := memory_in_use()) is not None:
        lower_limit(resource.RLIMIT_AS, in_use + more_bytes)


def memory_in_use() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as usage:  # noqa: PTH123 - a path object takes longer
            return int(usage.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


class SoftLimit:
    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._soft, self._hard = resource.getrlimit(kind)

    def set(self, wanted: int = resource.RLIM_INFINITY) -> None:
        resource.setrlimit(self._kind, (_least(wanted, self._soft, self._hard), self._hard))

    def set_seconds(self, more: int) -> None:
        """Limit the processor time to what this process has used and `more` seconds; the limit must be RLIMIT_CPU."""
        # At the soft limit the process ends with SIGXCPU, at the hard limit with SIGKILL, which says nothing.
        below_hard = self._hard if self._hard == resource.RLIM_INFINITY else max(self._hard - 1, 1)
        self.set(_least(int(time.process_time()) + more + 1, below_hard))


def inherited_limit(memory_bytes: int, seconds: int) -> str | None:
    """Return the limit of this process that stops its programs before they use so much, as a shell shows it; or None."""
    memory, processor = (_least(*resource.getrlimit(kind)) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU))
    if memory != resource.RLIM_INFINITY and memory < memory_bytes + _OF_THE_PROGRAM_BYTES:
        return f"ulimit -v {memory >> 10}"
    return f"ulimit -t {processor}" if processor != resource.RLIM_INFINITY and processor <= seconds + 1 else None


def _least(*limits: int) -> int:
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)
