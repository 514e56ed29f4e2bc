"""Readings of the machine while a run trains: GPUs through NVML; host memory, processor and disk through psutil.

A thread takes a reading at a fixed interval, and training collects the finished readings, so no step waits for a driver. A value
that a device does not report is None. Readings have no effect on training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainer.machine.gpus import GpuReading, Gpus, KernelLog
from trainer.machine.host import Host, HostReading

_log = logging.getLogger(__name__)
_JOIN_S = 2.0
_QUEUED_READINGS = 64


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
