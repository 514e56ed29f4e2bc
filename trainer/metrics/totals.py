"""Numbers over all steps of a run. They are a function of `metrics.jsonl`, so a run that resumes has exactly the same ones."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable

from trainer.runs.events import AlertEvent, Event, SaveEvent, TrainEvent

__all__ = ["RunningNumbers"]


class RunningNumbers:
    """The moving average of the training loss, the steps that were not finite, and the alerts by rule.

    Args:
        average_steps: steps that the average covers.
    """

    def __init__(self, average_steps: int) -> None:
        self._losses: deque[float] = deque(maxlen=average_steps)
        self.non_finite_steps = 0
        """Steps whose loss or gradient norm was not finite."""
        self.alerts: Counter[str] = Counter()
        """Number of alerts of each rule, in the order of the first alerts."""
        self._saved_step: int | None = None

    @property
    def num_averaged(self) -> int:
        """Steps in `loss_average`, with those that are not finite."""
        return len(self._losses)

    @property
    def loss_average(self) -> float | None:
        """Mean of the finite losses among the last `average_steps`; None if there are none."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return math.fsum(finite) / len(finite) if finite else None  # fsum: exact, so a resumed run has the same bits

    def after_step(self, loss: float, grad_norm: float) -> None:
        self._losses.append(loss)
        self.non_finite_steps += not (math.isfinite(loss) and math.isfinite(grad_norm))

    def after_alert(self, rule: str) -> int:
        """Add an alert. Returns how many of its rule there have been, with this one."""
        self.alerts[rule] += 1
        return self.alerts[rule]

    def after_save(self, step: int) -> bool:
        """Add a save. Returns whether it is the first one of its step."""
        is_first, self._saved_step = step != self._saved_step, step
        return is_first

    def restore(self, events: Iterable[Event]) -> None:
        """Replace all numbers by those of the events that the run has written."""
        self._losses.clear()
        self.alerts.clear()
        self.non_finite_steps = 0
        self._saved_step = None
        for event in events:
            if isinstance(event, TrainEvent):
                self.after_step(event.loss, event.grad_norm)
            elif isinstance(event, AlertEvent) and event.rule:
                self.after_alert(event.rule)
            elif isinstance(event, SaveEvent):
                self.after_save(event.step)
