"""Hands the events of a run to its sinks, and raises alerts."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common.files import parse_json, read_input
from common.redaction import redacted_settings
from trainer.config import AlertsConfig, TrainConfig
from trainer.distributed.group import Group
from trainer.distributed.stragglers import SlowRank
from trainer.health.alert_rules import AlertRules
from trainer.machine.sampler import Gpus, HardwareReading, HardwareSampler, Host, KernelLog
from trainer.metrics.layers import LayerReading
from trainer.metrics.sinks.base import RunFacts, Sink, StepMetrics
from trainer.metrics.sinks.json_lines import JsonLinesSink, NodeHardwareSink
from trainer.metrics.sinks.mlflow_sink import MlflowSink
from trainer.metrics.sinks.tensorboard import TensorBoardSink
from trainer.metrics.sinks.terminal import TerminalSink
from trainer.metrics.sinks.wandb_sink import WandbSink
from trainer.runs.events import AlertEvent, Event, HardwareEvent, SampleEvent, SaveEvent, ScoresEvent, TrainEvent
from trainer.runs.layout import METRICS
from trainer.runs.metrics_file import CutOff, events_until
from trainer.watchdog.processes import LAUNCHER_VARIABLE

_MAX_REPORT_BYTES = 64 << 20


class Monitor:
    """Hands events to the sinks and checks them. `sinks` is empty on ranks that only train. `history`: events of a state."""

    def __init__(
        self,
        sinks: list[Sink] | None = None,
        running: RunningNumbers | None = None,
        alerts: AlertsConfig | None = None,
        readings: Callable[[], Sequence[HardwareReading]] = lambda: (),
        history: Callable[[CutOff], Iterable[Event]] = lambda _known: (),
    ) -> None:
        self._sinks = [] if sinks is None else sinks
        self._running = running or RunningNumbers(100)
        self._rules = AlertRules(alerts or AlertsConfig())
        self._readings = readings
        self._history = history
        self._spent_s = 0.0
        self.stop_alert: AlertEvent | None = None  # of a rule whose action is to stop, on this rank only
        self.has_reported_stop = False

    @property
    def alert_counts(self) -> dict[str, int]:
        return dict(self._running.alerts)

    def write(self, event: Event | None) -> None:
        """An extension may give None."""
        if event is not None:
            for sink in self._sinks:
                sink.write(event)

    def train(self, metrics: StepMetrics) -> StepMetrics:
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
                self._alert_all(self._rules.after_step(full))
            for reading in self._readings():
                self.hardware(full.step, reading)
            return full

    def layers(self, reading: LayerReading | None) -> None:
        if reading is None:
            return
        with self._measured():
            if reading.norms:
                self.write(reading.event)
            for sink in self._sinks:
                sink.histograms(reading)

    def hardware(self, step: int, reading: HardwareReading) -> None:
        alerts = self._rules.after_reading(step, reading)
        self.write(HardwareEvent.of(step, reading, self._rules.memory_trend, self._rules.gpu_memory_trends))
        self._alert_all(alerts)

    def slow_rank(self, step: int, slow: SlowRank | None) -> None:
        if slow is not None:
            self._alert_all(self._rules.slow_rank(step, slow))

    def convergence(self, alerts: Iterable[AlertEvent]) -> None:
        for alert in alerts:
            self._alert_all(self._rules.configured(alert))

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        for sink in self._sinks:
            sink.samples(step, samples, scores)

    def saving(self, step: int, stall_s: float) -> None:
        """Report how long training waited for the checkpoint of a step. A second checkpoint of that step is not reported."""
        if self._running.after_save(step):
            self.write(SaveEvent(step, stall_s))

    def alert(self, alert: AlertEvent) -> None:
        self.has_reported_stop |= alert.action == "stop"
        self.write(replace(alert, count=self._running.after_alert(alert.rule)))

    def rewind(self, cut_off: CutOff) -> None:
        for sink in self._sinks:
            sink.rewind(cut_off)
        self._running.restore(self._history(cut_off))

    def sync(self) -> None:
        """Force the events to the device, so that no checkpoint is ahead of the numbers before it. Raises StorageError."""
        for sink in self._sinks:
            sink.sync()

    def close(self, status: str | None = None) -> None:
        """Close the sinks, the last one first, each of them even if another fails. A second call does nothing."""
        with ExitStack() as stack:
            while self._sinks:
                stack.callback(self._sinks.pop(0).close, status)

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


class RunningNumbers:
    def __init__(self, average_steps: int) -> None:
        self._losses: deque[float] = deque(maxlen=average_steps)
        self.non_finite_steps = 0
        self.alerts: Counter[str] = Counter()  # number of alerts of each rule, in the order of the first alerts
        self._saved_step: int | None = None

    @property
    def num_averaged(self) -> int:
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
        self.alerts[rule] += 1
        return self.alerts[rule]

    def after_save(self, step: int) -> bool:
        is_first, self._saved_step = step != self._saved_step, step
        return is_first

    def restore(self, events: Iterable[Event]) -> None:
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


@contextmanager
def opened_monitor(config: TrainConfig, group: Group, *, last_step: int | None, cut_off: CutOff | None) -> Iterator[Monitor]:
    """Rank 0 has all sinks; the first rank of each further machine has one for its hardware. `cut_off` is None for a new run."""
    with ExitStack() as stack:
        running, sinks = RunningNumbers(config.log.average_steps), list[Sink]()
        stack.callback(Monitor(sinks).close)

        def open_on_main() -> None:
            for sink in _sinks(config, last_step, cut_off):
                sinks.append(sink)
                sink.begin(facts)
            if cut_off is not None:
                running.restore(events_until(config.run / METRICS, cut_off))

        try:
            report = parse_json(read_input(config.data / "report.json", _MAX_REPORT_BYTES, below=config.data))
        except (OSError, ValueError):
            report = {}
        settings = redacted_settings(config.model_dump(mode="json"))
        facts = RunFacts(config.run.name, settings, report if isinstance(report, dict) else {})
        group.on_main(open_on_main)  # an error there is raised on every rank
        if group.local_rank:
            yield Monitor()
            return
        if not group.is_main:
            sinks.append(NodeHardwareSink(config.run / f"hardware-rank-{group.rank}.jsonl", cut_off))
        readings = stack.enter_context(_readings(config, group))
        yield Monitor(sinks, running, config.alerts, readings, history=partial(events_until, config.run / METRICS))


def _sinks(config: TrainConfig, last_step: int | None, cut_off: CutOff | None) -> Iterator[Sink]:
    run, settings = config.run, config.log
    yield JsonLinesSink(run / METRICS, cut_off)
    yield TensorBoardSink(run / "tensorboard", cut_off, settings.every_steps)
    yield TerminalSink(0 if cut_off is None else cut_off.step, last_step, settings.every_steps)
    if settings.wandb_project is not None:
        yield WandbSink(run, settings.wandb_project, settings.every_steps)
    if settings.mlflow_uri is not None:
        yield MlflowSink(run, settings.mlflow_uri, settings.mlflow_experiment, settings.every_steps)


@contextmanager
def _readings(config: TrainConfig, group: Group) -> Iterator[Any]:
    if not config.log.hardware_every_s:
        yield lambda: ()
        return
    launcher = int(os.environ.get(LAUNCHER_VARIABLE) or os.getpid())
    visible = range(torch.cuda.device_count() if group.device.type == "cuda" else 0)
    gpus = Gpus([str(torch.cuda.get_device_properties(number).uuid) for number in visible])
    sampler = HardwareSampler(gpus, Host(config.run, launcher), config.log.hardware_every_s, KernelLog())
    with sampler.running():
        yield sampler.take
