"""Reports the results of steps to sinks and ledger, and lets the guard judge them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.errors import GuardError
from trainer.distributed.stragglers import StragglerDetector
from trainer.extensions.initial_loss import initial_loss_warning
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard, guard_alert
from trainer.machine.peak_rates import Flops
from trainer.metrics import Monitor, StepFacts, StepMetrics
from trainer.metrics.ending import Ending
from trainer.metrics.layers import LayerObserver
from trainer.planning.forecast import Forecast
from trainer.planning.lines import time_lines
from trainer.runs.clock import Clock
from trainer.runs.context import RunContext
from trainer.runs.events import AlertEvent, EndEvent
from trainer.runs.ledger import Ledger
from trainer.runs.limits import Plan
from trainer.runs.metrics_file import CutOff
from trainer.runs.progress import Progress
from trainer.runs.signals import StopRequest
from trainer.runs.state import RunState
from trainer.training.adjuster import Adjuster
from trainer.training.step_report import StepResult

__all__ = ["GoBack", "RepeatStep", "Reporter", "RollBack", "TrainLoss"]

_log = logging.getLogger(__name__)


class GoBack(Exception):  # noqa: N818 - a request, no error
    """A request to continue from an earlier step. Raised on every rank in the same step."""


class RollBack(GoBack):
    """A request of the guard to go back to a checkpoint before the alert's step, and to leave out the positions [first, end)."""

    def __init__(self, alert: AlertEvent, first: int, end: int) -> None:
        super().__init__(alert.message)
        self.alert, self.first, self.end = alert, first, end


class RepeatStep(GoBack):
    """A request to repeat a void step on the same rows. A rank had no memory or no data."""

    def __init__(self, result: StepResult, facts: StepFacts) -> None:
        super().__init__()
        self.result, self.facts = result, facts


@dataclass(frozen=True)
class TrainLoss:
    """The kind of a step's loss."""

    own: bool
    """Whether the training minimises a loss of an extension."""
    measures: tuple[str, ...] = ()
    """Names of the measures of a step besides the loss."""
    has_perplexity: bool = True
    """Whether it is the cross-entropy of tokens, or that of an extension."""


@dataclass
class Reporter:
    """Hands the results of steps to sinks, ledger and guard."""

    context: RunContext
    limits: Plan
    clock: Clock
    stop: StopRequest
    monitor: Monitor
    ledger: Ledger | None
    """None on all ranks except rank 0."""
    guard: Guard
    train_losses: LossMean
    observer: LayerObserver
    adjuster: Adjuster
    ending: Ending
    flops: Flops
    stragglers: StragglerDetector
    loss: TrainLoss
    forecast: Forecast | None = None
    """The expected length of the run, on rank 0."""

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, by a signal or by an alert."""
        return self.stop.signal_name is not None or self.monitor.stop_alert is not None

    def report(self, result: StepResult, facts: StepFacts) -> StepMetrics:
        """Write the numbers of a step to the sinks, and its rows to the ledger."""
        seconds = self.clock.lap()
        self.limits.pace.add(result.step - 1, result.seconds)
        if self.forecast is not None and (step_s := self.clock.first_steps_s()) is not None:
            for line in time_lines(self.forecast, step_s):
                _log.info("%s", line)
        tokens_per_s = facts.num_targets / seconds
        metrics = StepMetrics(
            step=result.step,
            last_step=self.limits.last_step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=facts.rates.adamw,
            muon_lr=facts.rates.muon,
            targets=facts.progress.targets,
            tokens_per_s=tokens_per_s,
            mfu=self.flops.mfu(tokens_per_s, self.context.group.world_size),
            loader_wait_s=facts.loader_wait_s,
            seconds=seconds,
            run_s=self.clock.seconds,
            left_s=self.limits.left_s(result.step, self.clock.seconds),
            measures=dict(zip(self.loss.measures, result.measures, strict=True)),
            has_perplexity=self.loss.has_perplexity,
        )
        self.train_losses.add(result.loss)
        if result.step == 1 and self.loss.own:
            self._check_own_loss(result.loss, facts.progress)
        metrics = self.monitor.train(metrics)
        self.monitor.layers(self.observer.reading(result.step))
        for adjustment in self.adjuster.adjustments.beginning_at(result.step):
            self.adjuster.announce(adjustment, result.step, after=result.step - 1)
        if self.ledger is not None:
            start = facts.progress.rows - len(facts.rows)
            self.ledger.commit(step=result.step, start=start, rows=facts.rows, targets=facts.num_targets, applied=result.applied)
        self.ending.step = result.step
        self.monitor.slow_rank(result.step, self.stragglers.observe(result.own_times, seconds))
        return metrics

    def _check_own_loss(self, loss: float, progress: Progress) -> None:
        warning = initial_loss_warning(loss, progress.evaluations, self.context.manifest.vocab_size)
        if warning and self.context.group.is_main:
            _log.warning("%s", warning)

    def judge(self, result: StepResult, facts: StepFacts) -> None:
        """Let the guard judge a step, and raise an alert if a rule is broken.

        Raises:
            GuardError: the verdict is to stop.
            RollBack: the verdict is to go back to a checkpoint before this step.
        """
        verdict = self.guard.judge(result.step, result.loss, result.grad_norm)
        if verdict.rule is None:
            return
        config = self.context.config
        alert = guard_alert(verdict, result.step, result.loss, result.grad_norm, config.guard)
        if verdict.is_news and verdict.action != "rollback":
            self.monitor.alert(alert)
        first, end = facts.progress.rows - len(facts.rows), facts.progress.rows
        if verdict.action == "stop":
            raise GuardError(f"{verdict.message}. The rows of this step are at positions {first} to {end - 1} of the order")
        if verdict.action == "rollback":
            last = first + config.guard.window_steps * config.batch.global_rows
            raise RollBack(alert, first, max(end, last))

    def state(self, progress: Progress, scaler: Mapping[str, Any]) -> RunState:
        head = None if self.ledger is None else self.ledger.head
        return RunState(progress, scaler, self.guard.to_json(), self.train_losses.to_json(), head)

    def sync(self) -> None:
        """Flush ledger and metrics to the disk, on rank 0, before a checkpoint refers to them.

        Raises:
            StorageError, OSError: a file cannot be flushed.
        """
        assert self.ledger is not None
        self.ledger.sync()
        self.monitor.sync()

    def restore(self, state: RunState, *, rolled_back: bool) -> None:
        """Continue from a state. After a rollback the guard keeps its count of rollbacks, and nothing else."""
        self.train_losses = LossMean.from_json(state.train_losses)
        if rolled_back:
            self.guard.after_rollback(state.guard)
        else:
            self.guard.from_json(state.guard)

    def rewind(self, state: RunState, request: RollBack) -> None:
        """Remove all steps after a state from sinks and ledger, and write the positions to leave out into the ledger."""
        step = state.progress.step
        self.monitor.rewind(CutOff(step, evaluated=state.known.evaluated))
        self.monitor.alert(replace(request.alert, step=step))

        def note() -> None:
            assert self.ledger is not None
            assert state.ledger is not None
            self.ending.step = step
            self.ledger.rewind(state.ledger)
            left_out = {"start": request.first, "count": request.end - request.first}
            self.ledger.event("skip", step=step, **left_out, reason=request.alert.message)

        self.context.group.on_main(note)

    def finish(self, progress: Progress, weights_digest: str, *, stopped: bool) -> None:
        """Write into the record and the sinks how the run ended."""
        status, ended_by = ("stopped", self._stopped_by()) if stopped else ("finished", self.limits.ended_by(progress))
        self.ending.step, self.ending.alerts = progress.step, self.monitor.alert_counts

        def note() -> None:
            self.monitor.write(EndEvent(progress.step, status, ended_by))
            self.ending.record(status, ended_by, weights_digest)

        self.context.group.on_main(note)
        self.monitor.finish(status)
        if status == "finished" and ended_by is not None and not ended_by.startswith("limits."):
            _log.info("%s", ended_by)

    def raise_alert(self) -> None:
        """Raise GuardError on every rank if an alert of any rank ended the run with the action `stop`."""
        alert = self.monitor.stop_alert
        if self.context.group.smallest(0 if alert is None else -1) < 0:
            raise GuardError("" if alert is None else alert.message)

    def _stopped_by(self) -> str:
        alert = self.monitor.stop_alert
        return alert.message if alert is not None else self.stop.signal_name or "a signal to another rank, or an alert there"
