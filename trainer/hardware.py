"""What the machine is doing while it trains: GPUs through NVML, host memory, processor and disk through psutil.

A thread reads at its own interval and training takes what is there, so that no step waits for a driver. Whatever a device does not
tell is None; a reading never fails as a whole. Nothing here is needed for training, and nothing here changes a bit of it.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import pynvml

from common.host_memory import available_host_bytes

__all__ = [
    "GpuReading",
    "Gpus",
    "HardwareReading",
    "HardwareSampler",
    "Host",
    "HostReading",
    "KernelLog",
    "NvmlGpus",
    "opened_gpus",
    "throttle_reasons",
    "xids_in",
]

_log = logging.getLogger(__name__)
_ValueT = TypeVar("_ValueT")

_REASONS = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of NVML's clocks event reasons (nvml.h)."""
_XID = re.compile(r"NVRM: Xid \((?P<device>PCI:[0-9A-Fa-f:.]+)\): (?P<number>\d+)")
_MIB, _GB = 2**20, 10**9
_JOIN_S = 2.0
_QUEUED_READINGS = 64


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None: it does not tell."""

    index: int
    name: str
    answers: bool = True
    """False where the driver has lost it."""
    utilisation: float | None = None
    """Share of the last sampling period in which a kernel ran, 0 to 1."""
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    """Why the clocks are not higher, by the names of `throttle_reasons`."""
    ecc_corrected: int | None = None
    """Errors since the driver was loaded."""
    ecc_uncorrected: int | None = None


@dataclass(frozen=True)
class HostReading:
    """The machine, and the processes of this run on it, at one moment."""

    rss_mib: float
    """Of all processes of the run; pages that they share count in each."""
    private_mib: float
    """The part that is no file and not shared: it alone grows when memory leaks, the rest also when data is read."""
    available_mib: float
    """What the machine, or the container, has left."""
    cpu: float | None
    """Share of all processors' time that was used since the reading before, 0 to 1; None at the first."""
    disk_free_gb: float
    """Of the disk that holds the run."""
    disk_read_mb_per_s: float | None = None
    """Of all disks of the machine, since the reading before; None at the first."""
    disk_written_mb_per_s: float | None = None


@dataclass(frozen=True)
class HardwareReading:
    """All of it."""

    gpus: tuple[GpuReading, ...]
    host: HostReading
    xids: tuple[int, ...] = ()
    """Xid errors that the driver has reported since the reading before."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not known is left out."""
        parts = {"gpus": [_known(asdict(gpu)) for gpu in self.gpus], "host": _known(asdict(self.host))}
        return parts | ({"xids": list(self.xids)} if self.xids else {})


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of the bits that are set, lowest first; a bit without a name is `0x…`."""
    named = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(_REASONS.get(bit, f"{bit:#x}") for bit in named)


def xids_in(text: str) -> tuple[int, ...]:
    """The numbers of the Xid errors in lines of the kernel's log, in their order."""
    return tuple(int(found["number"]) for found in _XID.finditer(text))


class Gpus(Protocol):
    """Where readings of GPUs come from."""

    def read(self) -> tuple[GpuReading, ...]:
        """Each of them, now."""

    def xids(self) -> tuple[int, ...]:
        """Xid errors since the last call."""

    def close(self) -> None:
        """Lets go of the driver."""


class NoGpus:
    """A machine, or a run, without GPUs."""

    def read(self) -> tuple[GpuReading, ...]:
        """None."""
        return ()

    def xids(self) -> tuple[int, ...]:
        """None."""
        return ()

    def close(self) -> None:
        """Nothing to let go."""


class KernelLog:
    """Xid errors in the kernel's log, from now on; a log that may not be read, as in most containers, has none."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)

    def xids(self) -> tuple[int, ...]:
        """Those since the last call."""
        return xids_in("".join(self._records()))

    def close(self) -> None:
        """Closes the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _records(self) -> Iterator[str]:
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:  # older records were overwritten before they were read; the next ones are there
                continue
            except OSError:
                return
            if not record:
                return
            yield record.decode("utf-8", "replace")


class NvmlGpus:
    """GPUs through NVML. Each number is asked for by itself, because most devices lack one or the other.

    Args:
        uuids: those to read, in the order of their index, as torch names them; none: all of the machine.

    Raises:
        pynvml.NVMLError: there is no driver.
    """

    def __init__(self, uuids: Sequence[str] | None = None) -> None:
        pynvml.nvmlInit()
        self._handles = [_handle(uuid) for uuid in uuids] if uuids is not None else _all_handles()
        self._names = [_name(handle) for handle in self._handles]
        self._events = _xid_events(self._handles)

    def read(self) -> tuple[GpuReading, ...]:
        """Each GPU, now."""
        return tuple(self._reading(index) for index in range(len(self._handles)))

    def xids(self) -> tuple[int, ...]:
        """Xid errors since the last call, from the driver's events, where it gives them to this process."""
        found: list[int] = []
        while self._events is not None:
            event = _asked(lambda: pynvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                break
            found.append(int(event.eventData))
        return tuple(found)

    def close(self) -> None:
        """Lets go of the driver."""
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _reading(self, index: int) -> GpuReading:
        handle, name = self._handles[index], self._names[index]
        try:
            memory = _told(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
            busy = _told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
            reasons = _told(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
            return GpuReading(
                index,
                name,
                utilisation=None if busy is None else busy.gpu / 100,
                memory_used_mib=None if memory is None else memory.used / _MIB,
                memory_total_mib=None if memory is None else memory.total / _MIB,
                temperature_c=_told(lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
                power_w=_told(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
                power_limit_w=_told(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
                sm_clock_mhz=_told(lambda: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))),
                memory_clock_mhz=_told(lambda: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))),
                throttle=None if reasons is None else throttle_reasons(int(reasons)),
                ecc_corrected=_told(lambda: _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)),
                ecc_uncorrected=_told(lambda: _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)),
            )
        except pynvml.NVMLError:
            return GpuReading(index, name, answers=False)


def opened_gpus(uuids: Sequence[str]) -> Gpus:
    """The GPUs of these names; without a driver that answers, none, and a line in the log says so."""
    if not uuids:
        return NoGpus()
    try:
        return NvmlGpus(uuids)
    except pynvml.NVMLError as error:
        _log.warning("GPUs are not watched, as NVML does not answer (%s); run `nvidia-smi` to see why", error)
        return NoGpus()


class Host:
    """Memory, processor and disk.

    Args:
        run: directory whose disk counts.
        process: the process whose tree counts: the launcher of the ranks, or this one.
    """

    def __init__(self, run: Path, process: int) -> None:
        self._run = run
        self._process = process
        self._last: tuple[float, int, int] | None = None
        self._is_first = True

    def read(self) -> HostReading:
        """Now."""
        resident, private = self._memory()
        read_rate, write_rate = self._disk_rates()
        busy = psutil.cpu_percent(None) / 100  # since the call before in this thread
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
        """Resident and private bytes of the tree; a process that ends meanwhile counts nothing."""
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
        except (OSError, RuntimeError, NotImplementedError):  # a container may hide them
            return None, None
        if counters is None:
            return None, None
        last, self._last = self._last, (time.monotonic(), counters.read_bytes, counters.write_bytes)
        if last is None:
            return None, None
        seconds = max(1e-9, self._last[0] - last[0])
        return (self._last[1] - last[1]) / seconds / 1e6, (self._last[2] - last[2]) / seconds / 1e6


class HardwareSampler:
    """Reads every so many seconds in a thread of its own; `take` gives what has been read, without waiting."""

    def __init__(self, gpus: Gpus, host: Host, every_s: float, kernel_log: KernelLog | None = None) -> None:
        self._gpus, self._host, self._every_s = gpus, host, every_s
        self._kernel_log = kernel_log
        self._readings: deque[HardwareReading] = deque(maxlen=_QUEUED_READINGS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hardware", daemon=True)

    @contextmanager
    def running(self) -> Iterator[HardwareSampler]:
        """Reads inside, the first time at once."""
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
        """The readings since the last call, oldest first."""
        taken = []
        while self._readings:
            taken.append(self._readings.popleft())
        return taken

    def read(self) -> HardwareReading:
        """One reading, in the thread that calls."""
        gpus, host = self._gpus.read(), self._host.read()
        # Both are emptied, and last: what is left there would be told twice, and what a reading that fails has taken not at all.
        logged = () if self._kernel_log is None else self._kernel_log.xids()
        return HardwareReading(gpus, host, self._gpus.xids() or logged)

    def _work(self) -> None:
        fails = False
        while True:
            try:
                self._readings.append(self.read())
                fails = False
            except Exception as error:
                if not fails:
                    _log.warning("the machine is not watched for now: %s: %s; training goes on", type(error).__name__, error)
                fails = True
            if self._stop.wait(self._every_s):
                return


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items() if value is not None}


def _asked(question: Callable[[], _ValueT]) -> _ValueT | None:
    """The answer, or None where the driver gives none for whatever reason."""
    try:
        return question()
    except pynvml.NVMLError:
        return None


def _told(question: Callable[[], _ValueT]) -> _ValueT | None:
    """The answer, or None where this device does not know it; a device that is gone raises."""
    try:
        return question()
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_Uninitialized, pynvml.NVMLError_ResetRequired):
        raise
    except pynvml.NVMLError:
        return None


def _handle(uuid: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _all_handles() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _name(handle: Any) -> str:
    name = _asked(lambda: pynvml.nvmlDeviceGetName(handle)) or "unknown"
    return name.decode() if isinstance(name, bytes) else str(name)


def _ecc(handle: Any, kind: int) -> int:
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC))


def _xid_events(handles: Sequence[Any]) -> Any | None:
    """The set of the driver's events that tells Xid errors; None where a device has no such events."""

    def register() -> Any:
        events = pynvml.nvmlEventSetCreate()
        for handle in handles:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        return events

    return _asked(register) if handles else None
