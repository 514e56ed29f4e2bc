from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from common.text import format_bytes
from trainer.checkpoint.of_run import weights_digest
from trainer.context import RunContext
from trainer.data.batch import GlobalBatch
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.stragglers import OwnTime, OwnTimer, StragglerDetector
from trainer.evaluation.tally import Grouping
from trainer.extensions.hooks import Extension, RunView
from trainer.machine.memory import PeakMeter
from trainer.machine.peak_rates import Flops
from trainer.machine.profiler import StepProfiler
from trainer.metrics.layers import LayerObserver
from trainer.metrics.sinks.base import LearningRates
from trainer.optim.optimizers import set_learning_rate
from trainer.optim.schedule import learning_rate_factor, weight_decay_factor
from trainer.planning.forecast import Forecast
from trainer.runs.clock import Clock
from trainer.runs.state import Progress
from trainer.training.adjuster import Adjuster
from trainer.training.run_end import RunEnd, StopRequests
from trainer.training.saver import LiveState, Saver
from trainer.training.step import PendingStep, StepInputs
from trainer.training.trainable import RunData, Trainable
from trainer.watchdog.heartbeat import HeartbeatWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRun:
    context: RunContext
    data: RunData
    trainable: Trainable
    end: RunEnd
    state: LiveState
    resumed: Progress  # the counters from which this start of the run continues
    clock: Clock
    heartbeat: HeartbeatWriter
    stop: StopRequests
    own_timer: OwnTimer
    replica_check: ReplicaCheck
    adjuster: Adjuster
    saver: Saver
    observer: LayerObserver
    stragglers: StragglerDetector
    flops: Flops
    forecast: Forecast  # the expected length of the run, and its memory
    grouping: Grouping  # of the validation rows
    memory: PeakMeter
    profiler: StepProfiler

    @property
    def extension(self) -> Extension:
        return self.trainable.extension

    @property
    def result_lag(self) -> int:
        """Steps between a step and the reading of its result: 1 on a GPU, so that the host never waits for the device, else 0."""
        return 1 if self.context.group.device.type == "cuda" else 0

    def view(self, progress: Progress) -> RunView:
        return self.trainable.view(progress)

    def evaluation_due(self, progress: Progress) -> bool:
        due = progress.step % self.context.config.eval.every_steps == 0 or self.end.finished(progress)
        return due and progress.evaluated_step != progress.step

    def next_batch(self, batches: Iterator[GlobalBatch], step: int) -> tuple[GlobalBatch, float]:
        self.profiler.before_step(step)
        self.heartbeat.at("data", step)
        begin = time.monotonic()
        batch = next(batches)
        waited_s = time.monotonic() - begin
        self.own_timer.waited_for_data(waited_s)
        self.heartbeat.at_forward(batch.shapes)
        return batch, waited_s

    def set_learning_rate(self, progress: Progress) -> LearningRates:
        schedule, optim = self.context.config.schedule, self.context.config.optim
        decay_steps, cooldown_start = self.end.decay()
        factor = learning_rate_factor(schedule, decay_steps, progress.step, cooldown_start)
        decay = weight_decay_factor(schedule, self.end.criteria.decay_steps, progress.step, factor)
        factors = (factor, self.state.guard.lr_factor)
        set_learning_rate(self.trainable.optimizers, *factors, decay_factor=decay)
        muon_lr = math.prod(factors, start=optim.muon_lr or optim.lr) if optim.kind == "muon" else None
        return LearningRates(math.prod(factors, start=optim.lr), muon_lr)

    def step_inputs(self, step: int) -> StepInputs:
        def before_exchange() -> OwnTime:
            self.own_timer.end()
            self.heartbeat.at("reduce")
            return self.own_timer.latest()

        return StepInputs(
            step=step,
            seconds=self.clock.seconds,
            ending_s=self.clock.ending_s,
            stop_requested=self.stop.requested,
            save_failed=self.saver.writer.failed,
            acknowledged_step=self.saver.writer.acknowledged_step,
            thresholds=self.state.guard.thresholds(step),
            before_exchange=before_exchange,
            observer=self.observer,
        )

    def after_step(self, step: int, pending: PendingStep) -> None:
        self.own_timer.begin()
        self.heartbeat.at("report")
        if self.replica_check.due(step):
            self.replica_check.begin(step)
        if self.trainable.average is not None:
            self.trainable.average.update(step, pending.skip)
        with self.clock.paused():
            self.profiler.after_step(step)

    def finish(self, progress: Progress, *, stopped: bool) -> str:
        """Return `weights sha256:… steps N` on every rank: the digest of all weights by name, as little-endian fp32."""
        _log.info("%s; measured peak %s", self.forecast.memory.describe(), format_bytes(self.memory.bytes()))
        weights = self.trainable.weights()
        digest = self.context.group.on_main(lambda: weights_digest(weights))
        status, ended_by = ("stopped", self.stop.reason) if stopped else ("finished", self.end.ended_by(progress))
        self.context.group.on_main(lambda: self.state.ending.end(self.state.monitor, status, ended_by, digest))
        if stopped:
            self.stop.end_training(self.context.config.run, progress.step)
        if ended_by is not None and not ended_by.startswith("limits."):
            _log.info("%s", ended_by)
        return f"weights {digest} steps {progress.step}"
