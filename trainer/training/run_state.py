"""The state of a run besides its tensors: guard, training losses and ledger. Checkpoints hold it, and rollbacks restore it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.distributed.group import Group
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.metrics import Monitor
from trainer.metrics.run_status import RunStatus
from trainer.runs.events import AlertEvent
from trainer.runs.ledger import Ledger
from trainer.runs.metrics_file import CutOff
from trainer.runs.progress import Progress
from trainer.runs.state import RunState


@dataclass
class LiveState:
    group: Group
    guard: Guard
    ledger: Ledger | None  # None on all ranks except rank 0
    monitor: Monitor
    ending: RunStatus
    train_losses: LossMean = field(default_factory=LossMean)  # the training losses since the last evaluation

    def at(self, progress: Progress, scaler: Mapping[str, Any]) -> RunState:
        head = None if self.ledger is None else self.ledger.head
        return RunState(progress, dict(scaler), self.guard.state, self.train_losses.state, head)

    def sync(self) -> None:
        """Flush ledger and metrics to the disk, on rank 0, before a checkpoint refers to them."""
        assert self.ledger is not None
        self.ledger.sync()
        self.monitor.sync()

    def resume(self, state: RunState) -> None:
        self.train_losses = LossMean(state.train_losses)
        self.guard.restore(state.guard)

    def roll_back(self, state: RunState, alert: AlertEvent, first: int, end: int) -> None:
        """Go back to a state, and note in the ledger that the positions from `first` to before `end` are left out.

        All later steps are removed from sinks and ledger. The guard keeps its count of rollbacks, and nothing else.
        """
        step = state.progress.step
        self.train_losses = LossMean(state.train_losses)
        self.guard.after_rollback(state.guard)
        self.monitor.rewind(CutOff(step, evaluated=state.known.evaluated))
        self.monitor.alert(replace(alert, step=step))

        def note() -> None:
            assert self.ledger is not None
            assert state.ledger is not None
            self.ending.step = step
            self.ledger.rewind(state.ledger)
            self.ledger.event("skip", step=step, start=first, count=end - first, reason=alert.message)

        self.group.on_main(note)
