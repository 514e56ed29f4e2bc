"""Hands the events of a run to its sinks, and raises alerts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from trainer.config import AlertsConfig
from trainer.distributed.stragglers import SlowRank
from trainer.health.alert_rules import AlertRules
from trainer.machine.sampler import HardwareReading
from trainer.metrics.layers import LayerReading
from trainer.metrics.sinks.base import Sink
from trainer.metrics.step_metrics import StepMetrics
from trainer.metrics.totals import RunningNumbers
from trainer.runs.events import AlertEvent, Event, HardwareEvent, SampleEvent, SaveEvent, ScalarsEvent, ScoresEvent
from trainer.runs.metrics_file import CutOff

__all__ = ["Monitor"]


class Monitor:
    """Hands events to the sinks, and checks them against the alert rules.

    Args:
        sinks: the sinks; empty on ranks that only train.
        running: numbers over all steps, restored to the step from which the run resumes.
        alerts: settings of the alert rules.
        readings: returns the readings of the machine since its last call.
        history: returns the events of the run that a state covers.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        running: RunningNumbers | None = None,
        alerts: AlertsConfig | None = None,
        readings: Callable[[], Sequence[HardwareReading]] = lambda: (),
        history: Callable[[CutOff], Iterable[Event]] = lambda _known: (),
    ) -> None:
        self._sinks = tuple(sinks)
        self._running = running or RunningNumbers(100)
        self._rules = AlertRules(alerts or AlertsConfig())
        self._readings = readings
        self._history = history
        self._spent_s = 0.0
        self.stop_alert: AlertEvent | None = None
        """The first alert of a rule here whose action is to stop: the run saves and ends. Only this rank has it."""
        self.has_reported_stop = False
        """Whether an alert with the action to stop was reported."""

    @property
    def alert_counts(self) -> dict[str, int]:
        return dict(self._running.alerts)

    def model(self, graph: bytes) -> None:
        for sink in self._sinks:
            sink.model(graph)

    def write(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def train(self, metrics: StepMetrics) -> StepMetrics:
        """Report a step, and the readings of the machine since the step before. Returns the metrics with what the monitor adds."""
        with self._measured():
            self._running.after_step(metrics.loss, metrics.grad_norm)
            spent_s, self._spent_s = self._spent_s, 0.0
            full = replace(
                metrics,
                loss_average=self._running.loss_average,
                num_averaged=self._running.num_averaged,
                non_finite_steps=self._running.non_finite_steps,
                monitor_s=spent_s,
            )
            self.write(full)
            if self._sinks:
                self._alert_all(
                    self._rules.after_step(
                        full.step, seconds=full.seconds, waited_s=full.loader_wait_s, tokens_per_s=full.tokens_per_s
                    )
                )
            for reading in self._readings():
                self.hardware(full.step, reading)
            return full

    def layers(self, reading: LayerReading | None) -> None:
        """Report norms and histograms of the layers, if there are any."""
        if reading is None:
            return
        with self._measured():
            if reading.norms:
                self.write(reading.event)
            for sink in self._sinks:
                sink.histograms(reading)

    def hardware(self, step: int, reading: HardwareReading) -> None:
        """Report what the machine did at about this step."""
        alerts = self._rules.after_reading(step, reading)
        self.write(HardwareEvent.of(step, reading, self._rules.memory_trend, self._rules.gpu_memory_trends))
        self._alert_all(alerts)

    def slow_rank(self, step: int, slow: SlowRank | None) -> None:
        """Report a slow rank, if there is one."""
        if slow is not None:
            self._alert_all(self._rules.slow_rank(step, slow))

    def convergence(self, alerts: Iterable[AlertEvent]) -> None:
        for alert in alerts:
            self._alert_all(self._rules.configured(alert))

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        for sink in self._sinks:
            sink.samples(step, samples, scores)

    def scalars(self, event: ScalarsEvent | None) -> None:
        """Report what a hook of an extension logged, if it logged anything."""
        if event is not None:
            self.write(event)

    def saving(self, step: int, stall_s: float) -> None:
        """Report how long training waited for the checkpoint of a step. A second checkpoint of that step is not reported."""
        if self._running.after_save(step):
            self.write(SaveEvent(step, stall_s))

    def alert(self, alert: AlertEvent) -> None:
        """Report an alert of the guard, of the rules here, or of another part of the run."""
        self.has_reported_stop |= alert.action == "stop"
        self.write(replace(alert, count=self._running.after_alert(alert.rule)))

    def rewind(self, known: CutOff) -> None:
        """Remove all events that the state does not cover to which the run goes back, and restore the running numbers."""
        for sink in self._sinks:
            sink.rewind(known)
        self._running.restore(self._history(known))

    def sync(self) -> None:
        """Force the events in all sinks to the device, so that no checkpoint is ahead of the numbers before it.

        Raises:
            StorageError: it failed.
        """
        for sink in self._sinks:
            sink.sync()

    def finish(self, status: str) -> None:
        """Report how the run ended, if it did not fail."""
        for sink in self._sinks:
            sink.finish(status)

    def _alert_all(self, alerts: Iterable[AlertEvent]) -> None:
        for alert in alerts:
            if alert.action == "stop" and self.stop_alert is None:
                self.stop_alert = alert
            self.alert(alert)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - begin
