"""Readings of GPUs while a run trains, from NVML and the kernel log."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

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


class NoGpus:
    def read(self) -> tuple[GpuReading, ...]:
        return ()

    def xids(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        pass


class KernelLog:
    """Xid errors in the kernel log from now on. If the log cannot be read, as in most containers, there are none."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)

    def xids(self) -> tuple[int, ...]:
        return xids_in("".join(self._records()))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _records(self) -> Iterator[str]:
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:  # records were overwritten before they were read; later ones can be read
                continue
            except OSError:
                return
            if not record:
                return
            yield record.decode("utf-8", "replace")


class NvmlGpus:
    """GPUs through NVML, by the UUIDs that torch names. Each value is queried separately, because most devices lack some."""

    def __init__(self, uuids: Sequence[str]) -> None:
        pynvml.nvmlInit()
        self._handles = [
            pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}") for uuid in uuids
        ]
        self._names = [_name(handle) for handle in self._handles]
        self._events = _xid_events(self._handles)

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
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _reading(self, index: int) -> GpuReading:
        gpu, name = self._handles[index], self._names[index]
        queries = {fact.name: fact.metadata["query"] for fact in fields(GpuReading) if fact.metadata}
        try:
            values: dict[str, Any] = {fact: _supported(partial(query, gpu)) for fact, query in queries.items()}
            return GpuReading(index, name, **values)
        except pynvml.NVMLError:
            return GpuReading(index, name, answers=False)


Gpus: TypeAlias = NvmlGpus | NoGpus  # a source of readings of GPUs


def opened_gpus(uuids: Sequence[str]) -> Gpus:
    """Return the GPUs with these UUIDs; none, with a warning, if NVML does not respond."""
    if not uuids:
        return NoGpus()
    try:
        return NvmlGpus(uuids)
    except pynvml.NVMLError as error:
        _log.warning("GPUs are not monitored, because NVML does not respond (%s); run `nvidia-smi` to see why", error)
        return NoGpus()


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


def _supported(query: Callable[[], _ValueT]) -> _ValueT | None:
    try:
        return query()
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_Uninitialized, pynvml.NVMLError_ResetRequired):
        raise
    except pynvml.NVMLError:
        return None


def _name(handle: Any) -> str:
    name = _answer(lambda: pynvml.nvmlDeviceGetName(handle)) or "unknown"
    return name.decode() if isinstance(name, bytes) else str(name)


def _xid_events(handles: Sequence[Any]) -> Any | None:
    def register() -> Any:
        events = pynvml.nvmlEventSetCreate()
        for handle in handles:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        return events

    return _answer(register) if handles else None
