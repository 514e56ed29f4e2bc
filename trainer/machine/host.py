from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.host_memory import available_host_bytes

_MIB, _GB = 2**20, 10**9


@dataclass(frozen=True)
class HostReading:
    rss_mib: float  # Resident memory of all processes of the run. Shared pages count for each process.
    private_mib: float
    """The part of `rss_mib` that is neither shared nor backed by a file. A leak increases it; reading data increases the rest."""
    available_mib: float  # free memory of the machine or the container
    cpu: float | None  # Used share of the time of all processors since the last reading, 0 to 1. None in the first reading.
    disk_free_gb: float  # free space on the disk of the run
    disk_read_mb_per_s: float | None = None  # Rate over all disks of the machine since the last reading. None in the first reading.
    disk_written_mb_per_s: float | None = None


class Host:
    """Reads memory, processor and disk: of the process tree below `process`, and of the disk of the run."""

    def __init__(self, run: Path, process: int) -> None:
        self._run = run
        self._process = process
        self._last: tuple[float, int, int] | None = None
        self._is_first = True

    def read(self) -> HostReading:
        resident, private = self._memory()
        read_rate, write_rate = self._disk_rates()
        busy = psutil.cpu_percent(None) / 100  # since the last call in this thread
        is_first, self._is_first = self._is_first, False
        return HostReading(
            rss_mib=resident / _MIB,
            private_mib=private / _MIB,
            available_mib=available_host_bytes() / _MIB,
            cpu=None if is_first else busy,
            disk_free_gb=shutil.disk_usage(self._run).free / _GB,
            disk_read_mb_per_s=read_rate,
            disk_written_mb_per_s=write_rate,
        )

    def _memory(self) -> tuple[int, int]:
        # a process that ends meanwhile counts as 0
        resident = private = 0
        with suppress(psutil.Error):
            root = psutil.Process(self._process)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    memory = process.memory_info()
                    resident += memory.rss
                    private += memory.rss - memory.shared
        return resident, private

    def _disk_rates(self) -> tuple[float | None, float | None]:
        try:
            counters = psutil.disk_io_counters()
        except (OSError, RuntimeError, NotImplementedError):  # a container may hide the counters
            return None, None
        if counters is None:
            return None, None
        last, self._last = self._last, (time.monotonic(), counters.read_bytes, counters.write_bytes)
        if last is None:
            return None, None
        seconds = max(1e-9, self._last[0] - last[0])
        return (self._last[1] - last[1]) / seconds / 1e6, (self._last[2] - last[2]) / seconds / 1e6
