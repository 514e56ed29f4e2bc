"""Readings of the machine while a run trains: GPUs through NVML; host memory, processor and disk through psutil.

A thread takes a reading at a fixed interval, and training collects the finished readings, so no step waits for a driver. A value
that a device does not report is None. Readings have no effect on training.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.host_memory import available_host_bytes
from trainer.machine.gpus import GpuReading, Gpus, KernelLog

_log = logging.getLogger(__name__)
_JOIN_S = 2.0
_QUEUED_READINGS = 64
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
        resident = private = 0
        with suppress(psutil.Error):  # a process that ends meanwhile counts as 0
            root = psutil.Process(self._process)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    memory = process.memory_info()
                    resident += memory.rss
                    private += memory.rss - memory.shared
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

    def _disk_rates(self) -> tuple[float | None, float | None]:
        counters = None
        with suppress(OSError, RuntimeError, NotImplementedError):  # a container may hide the counters
            counters = psutil.disk_io_counters()
        if counters is None:
            return None, None
        last, self._last = self._last, (time.monotonic(), counters.read_bytes, counters.write_bytes)
        if last is None:
            return None, None
        seconds = max(1e-9, self._last[0] - last[0])
        return (self._last[1] - last[1]) / seconds / 1e6, (self._last[2] - last[2]) / seconds / 1e6


@dataclass(frozen=True)
class HardwareReading:
    gpus: tuple[GpuReading, ...]
    host: HostReading
    xids: tuple[int, ...] = ()  # Xid errors that the driver has reported since the last reading
    taken_s: float | None = field(default=None, compare=False)
    """When it was taken, in seconds of a clock that never goes back; None if that is not known."""


class HardwareSampler:
    """Takes a reading every `every_s` seconds in a separate thread. `take` returns the finished readings without waiting."""

    def __init__(self, gpus: Gpus, host: Host, every_s: float, kernel_log: KernelLog | None = None) -> None:
        self._gpus, self._host, self._every_s = gpus, host, every_s
        self._kernel_log = kernel_log
        self._readings: deque[HardwareReading] = deque(maxlen=_QUEUED_READINGS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hardware", daemon=True)

    @contextmanager
    def running(self) -> Iterator[HardwareSampler]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(_JOIN_S)  # a driver that hangs must not keep a run from ending
            if not self._thread.is_alive():
                self._gpus.close()
                if self._kernel_log is not None:
                    self._kernel_log.close()

    def take(self) -> list[HardwareReading]:
        taken = []
        while self._readings:
            taken.append(self._readings.popleft())
        return taken

    def read(self) -> HardwareReading:
        gpus, host = self._gpus.read(), self._host.read()
        # Read both sources, or the same error is reported twice. Read them last, or a failed reading loses their errors.
        logged = () if self._kernel_log is None else self._kernel_log.xids()
        return HardwareReading(gpus, host, self._gpus.xids() or logged, time.monotonic())

    def _work(self) -> None:
        fails = False
        while True:
            try:
                self._readings.append(self.read())
                fails = False
            except Exception as error:
                if not fails:
                    _log.warning("hardware is not monitored for now: %s: %s; training continues", type(error).__name__, error)
                fails = True
            if self._stop.wait(self._every_s):
                return
