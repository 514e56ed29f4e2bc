"""The door for requests to stop: by a signal or an alert on this rank, or on another rank, which votes with its next step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from common.errors import GuardError, StoppedBySignal
from trainer.distributed.group import Group
from trainer.metrics import Monitor
from trainer.runs.signals import StopSignal


@dataclass(frozen=True)
class StopRequests:
    signal: StopSignal
    group: Group
    monitor: Monitor | None = None  # has the alert with the action `stop`; None before the run is open

    @property
    def requested(self) -> bool:
        return self.signal.name is not None or (self.monitor is not None and self.monitor.stop_alert is not None)

    def on_any_rank(self) -> bool:
        """All ranks must call this."""
        return self.group.smallest(-1 if self.requested else 0) < 0

    @property
    def reason(self) -> str:
        alert = None if self.monitor is None else self.monitor.stop_alert
        return alert.message if alert is not None else self.signal.name or "a signal to another rank, or an alert there"

    def end_start(self, run: Path, newest: int | None) -> NoReturn:
        """End a start that was asked to stop. No file of the run has changed yet; `newest` is the step of its checkpoint. An engine
        takes StoppedBySignal as a reason to start again, so Ctrl-C without a checkpoint is a KeyboardInterrupt.
        """
        saved = "has no checkpoint yet" if newest is None else f"has its checkpoint of step {newest}"
        message = f"no step was trained, and no file was changed; {run} {saved}; run the same command again to go on"
        if newest is None and self.signal.name == "SIGINT":
            raise KeyboardInterrupt(message)
        raise StoppedBySignal(message if self.group.local_rank == 0 else "")

    def end_training(self, run: Path, step: int) -> NoReturn:
        """Raises GuardError on every rank if an alert of any rank ended the training, else StoppedBySignal."""
        alert = None if self.monitor is None else self.monitor.stop_alert
        if self.group.smallest(0 if alert is None else -1) < 0:
            raise GuardError("" if alert is None else alert.message)
        message = f"saved step {step} in {run}; run the same command again to go on"
        raise StoppedBySignal(message if self.group.local_rank == 0 else "")
