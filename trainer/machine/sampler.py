"""Readings of the machine while a run trains: GPUs through NVML; host memory, processor and disk through psutil.

A thread takes a reading at a fixed interval, and training collects the finished readings, so no step waits for a driver. A value
that a device does not report is None. Readings have no effect on training.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml

from common.hardware import available_host_bytes, throttle_reasons

_log = logging.getLogger(__name__)

_ValueT = TypeVar("_ValueT")
_MIB, _GB = 2**20, 10**9
_XID = re.compile(r"NVRM: Xid \((?P<device>PCI:[0-9A-Fa-f:.]+)\): (?P<number>\d+)")


def _ecc(gpu: Any, kind: int) -> int:
    return int(pynvml.nvmlDeviceGetTotalEccErrors(gpu, kind, pynvml.NVML_VOLATILE_ECC))


def _fact(query: Callable[[Any], Any]) -> Any:
    return field(default=None, metadata={"query": query})


@dataclass(frozen=True)
class GpuReading:
    """The state of one GPU at one moment: facts, each with its query of NVML. A value is None if the GPU does not report it."""

    index: int
    name: str
    answers: bool = True  # False if the driver has lost the GPU
    utilisation: float | None = _fact(lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
    """Share of the last sampling period in which a kernel ran, 0 to 1."""
    memory_used_mib: float | None = _fact(lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB)
    memory_total_mib: float | None = _fact(lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total / _MIB)
    temperature_c: float | None = _fact(lambda gpu: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)))
    power_w: float | None = _fact(lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
    power_limit_w: float | None = _fact(lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)
    sm_clock_mhz: float | None = _fact(lambda gpu: float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)))
    memory_clock_mhz: float | None = _fact(lambda gpu: float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)))
    throttle: tuple[str, ...] | None = _fact(lambda gpu: throttle_reasons(int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))))
    """Reasons why the clock rates are limited, with the names of `throttle_reasons`."""
    ecc_corrected: int | None = _fact(lambda gpu: _ecc(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED))
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = _fact(lambda gpu: _ecc(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED))


def xids_in(text: str) -> tuple[int, ...]:
    return tuple(int(found["number"]) for found in _XID.finditer(text))


class KernelLog:
    """Xid errors in the kernel log from now on. If the log cannot be read, as in most containers, there are none."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)

    def xids(self) -> tuple[int, ...]:
        records = b""
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:  # records were overwritten before they were read; later ones can be read
                continue
            except OSError:
                break
            if not record:
                break
            records += record
        return xids_in(records.decode("utf-8", "replace"))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Gpus:
    """GPUs through NVML, by the UUIDs that torch names; none, with a warning, if NVML does not respond.

    Each value is queried separately, because most devices lack some.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._handles: list[Any] = []
        self._events: Any = None
        if not uuids:
            return
        try:
            pynvml.nvmlInit()
            names = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in uuids)
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        except pynvml.NVMLError as error:
            _log.warning("GPUs are not monitored, because NVML does not respond (%s); run `nvidia-smi` to see why", error)
            return
        found = [_answer(partial(pynvml.nvmlDeviceGetName, handle)) or "unknown" for handle in self._handles]
        self._names = [name.decode() if isinstance(name, bytes) else str(name) for name in found]
        with suppress(pynvml.NVMLError):
            events = pynvml.nvmlEventSetCreate()
            for handle in self._handles:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(self._reading(index) for index in range(len(self._handles)))

    def xids(self) -> tuple[int, ...]:
        """Return the Xid errors since the last call. Empty if the driver gives this process no events."""
        found: list[int] = []
        while self._events is not None:
            event = _answer(lambda: pynvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                break
            found.append(int(event.eventData))
        return tuple(found)

    def close(self) -> None:
        if self._handles:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _reading(self, index: int) -> GpuReading:
        gpu, name = self._handles[index], self._names[index]
        values: dict[str, Any] = {}
        for fact in (fact for fact in fields(GpuReading) if fact.metadata):
            try:
                values[fact.name] = fact.metadata["query"](gpu)
            except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_Uninitialized, pynvml.NVMLError_ResetRequired):
                return GpuReading(index, name, answers=False)
            except pynvml.NVMLError:
                continue  # this GPU does not report it
        return GpuReading(index, name, **values)


def driver_version() -> str | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    version = _answer(pynvml.nvmlSystemGetDriverVersion)
    pynvml.nvmlShutdown()
    return version.decode() if isinstance(version, bytes) else version


def _answer(query: Callable[[], _ValueT]) -> _ValueT | None:
    try:
        return query()
    except pynvml.NVMLError:
        return None


_JOIN_S = 2.0
_QUEUED_READINGS = 64


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
