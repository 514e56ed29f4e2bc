"""What GPUs do while a run trains, through NVML and the kernel's log."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pynvml

__all__ = ["GpuReading", "Gpus", "KernelLog", "NvmlGpus", "opened_gpus", "throttle_reasons", "xids_in"]

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
_MIB = 2**20


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


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of the bits that are set, lowest first; a bit without a name is `0x…`."""
    named = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(_REASONS.get(bit, f"{bit:#x}") for bit in named)


def xids_in(text: str) -> tuple[int, ...]:
    """The numbers of the Xid errors in lines of the kernel's log, in their order."""
    return tuple(int(found["number"]) for found in _XID.finditer(text))


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
        uuids: those to read, in the order of their index, as torch names them.

    Raises:
        pynvml.NVMLError: there is no driver.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        pynvml.nvmlInit()
        self._handles = [
            pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}") for uuid in uuids
        ]
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


Gpus: TypeAlias = NvmlGpus | NoGpus
"""Where readings of GPUs come from."""


def opened_gpus(uuids: Sequence[str]) -> Gpus:
    """The GPUs of these names; without a driver that answers, none, and a line in the log says so."""
    if not uuids:
        return NoGpus()
    try:
        return NvmlGpus(uuids)
    except pynvml.NVMLError as error:
        _log.warning("GPUs are not watched, as NVML does not answer (%s); run `nvidia-smi` to see why", error)
        return NoGpus()


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
