"""Readings of GPUs while a run trains, from NVML and the kernel log."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from common.hardware import throttle_reasons

_log = logging.getLogger(__name__)
_ValueT = TypeVar("_ValueT")
_XID = re.compile(r"NVRM: Xid \((?P<device>PCI:[0-9A-Fa-f:.]+)\): (?P<number>\d+)")
_MIB = 2**20


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
