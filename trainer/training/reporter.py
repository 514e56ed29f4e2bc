"""Reports the results of steps to sinks and ledger, and lets the guard judge them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.errors import GuardError
from trainer.config import GuardConfig
from trainer.distributed.stragglers import StragglerDetector
from trainer.extensions.hooks import initial_loss_warning
from trainer.health.guard import guard_alert
from trainer.machine.peak_rates import Flops
from trainer.metrics import Monitor, StepFacts, StepMetrics
from trainer.metrics.layers import LayerObserver
from trainer.planning.forecast import Forecast
from trainer.planning.lines import time_lines
from trainer.runs.clock import Clock
from trainer.runs.events import EndEvent
from trainer.runs.progress import Progress
from trainer.training.adjuster import Adjuster
from trainer.training.recovery import RollBack
from trainer.training.run_end import RunEnd
from trainer.training.run_state import LiveState
from trainer.training.step_report import StepResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainLoss:
    custom: bool  # whether the training minimises a loss of an extension
    vocab_size: int
    measures: tuple[str, ...] = ()  # names of the measures of a step besides the loss
    has_perplexity: bool = True  # whether it is the cross-entropy of tokens, or that of an extension


@dataclass(frozen=True)
class Reporter:
    state: LiveState
    end: RunEnd
    clock: Clock
    monitor: Monitor
    observer: LayerObserver
    adjuster: Adjuster
    flops: Flops
    stragglers: StragglerDetector
    loss: TrainLoss
    guard_settings: GuardConfig
    forecast: Forecast | None  # the expected length of the run; None on all ranks except rank 0

    def report(self, result: StepResult, facts: StepFacts) -> StepMetrics:
        state, group, seconds = self.state, self.state.group, self.clock.lap()
        self.end.times.add(result.step - 1, result.seconds)
        if self.forecast is not None and (step_s := self.clock.first_steps_s()) is not None:
            for line in time_lines(self.forecast, step_s):
                _log.info("%s", line)
        tokens_per_s = facts.num_targets / seconds
        metrics = StepMetrics(
            step=result.step,
            last_step=self.end.last_step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=facts.rates.adamw,
            muon_lr=facts.rates.muon,
            targets=facts.progress.targets,
            tokens_per_s=tokens_per_s,
            mfu=self.flops.mfu(tokens_per_s, group.world_size),
            loader_wait_s=facts.loader_wait_s,
            seconds=seconds,
            run_s=self.clock.seconds,
            left_s=self.end.left_s(result.step, self.clock.seconds),
            measures=dict(zip(self.loss.measures, result.measures, strict=True)),
            has_perplexity=self.loss.has_perplexity,
        )
        state.train_losses.add(result.loss)
        if result.step == 1 and self.loss.custom and group.is_main:
            warning = initial_loss_warning(result.loss, facts.progress.evaluations, self.loss.vocab_size)
            if warning:
                _log.warning("%s", warning)
        metrics = self.monitor.train(metrics)
        self.monitor.layers(self.observer.reading(result.step))
        for adjustment in self.adjuster.adjustments.beginning_at(result.step):
            self.adjuster.announce(adjustment, result.step, after=result.step - 1)
        if state.ledger is not None:
            start = facts.progress.rows - len(facts.rows)
            state.ledger.commit(step=result.step, start=start, rows=facts.rows, targets=facts.num_targets, applied=result.applied)
        state.ending.step = result.step
        self.monitor.slow_rank(result.step, self.stragglers.observe(result.own_times, seconds))
        return metrics

    def judge(self, result: StepResult, facts: StepFacts) -> None:
        """Let the guard judge a step, and alert if a rule is broken. Raises GuardError or RollBack if that is the verdict."""
        verdict = self.state.guard.judge(result.step, result.loss, result.grad_norm)
        if verdict.rule is None:
            return
        alert = guard_alert(verdict, result.step, result.loss, result.grad_norm, self.guard_settings)
        if verdict.is_news and verdict.action != "rollback":
            self.monitor.alert(alert)
        first, end = facts.progress.rows - len(facts.rows), facts.progress.rows
        if verdict.action == "stop":
            raise GuardError(f"{verdict.message}. The rows of this step are at positions {first} to {end - 1} of the order")
        if verdict.action == "rollback":
            raise RollBack(alert, first, max(end, first + self.guard_settings.window_steps * len(facts.rows)))

    def finish(self, progress: Progress, weights_digest: str, *, stopped_by: str | None) -> None:
        """Write into the record and the sinks how the run ended; `stopped_by` is None if it reached its end."""
        ending = self.state.ending
        status, ended_by = ("finished", self.end.ended_by(progress)) if stopped_by is None else ("stopped", stopped_by)
        ending.step, ending.alerts = progress.step, self.monitor.alert_counts

        def note() -> None:
            self.monitor.write(EndEvent(progress.step, status, ended_by))
            ending.record(status, ended_by, weights_digest)

        self.state.group.on_main(note)
        self.monitor.finish(status)
        if status == "finished" and ended_by is not None and not ended_by.startswith("limits."):
            _log.info("%s", ended_by)
