"""What the machine is doing while it trains: GPUs through NVML, host memory, processor and disk through psutil.

A thread reads at its own interval and training takes what is there, so that no step waits for a driver. Whatever a device does not
tell is None; a reading never fails as a whole. Nothing here is needed for training, and nothing here changes a bit of it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from trainer.machine.gpus import GpuReading, Gpus, KernelLog
from trainer.machine.host import Host, HostReading

__all__ = ["HardwareReading", "HardwareSampler"]

_log = logging.getLogger(__name__)
_JOIN_S = 2.0
_QUEUED_READINGS = 64


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
