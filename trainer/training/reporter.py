"""Reports the results of a step to sinks and ledger."""

from __future__ import annotations

import logging

from trainer.extensions.hooks import initial_loss_warning
from trainer.metrics import StepFacts, StepMetrics
from trainer.planning.lines import time_lines
from trainer.training.step import StepResult
from trainer.training.training_run import TrainingRun

_log = logging.getLogger(__name__)


def report(run: TrainingRun, result: StepResult, facts: StepFacts) -> StepMetrics:
    state, end, group, seconds, task = run.state, run.end, run.context.group, run.clock.lap(), run.trainable.task
    end.times.add(result.step - 1, result.seconds)
    if group.is_main and (step_s := run.clock.first_steps_s()) is not None:
        for line in time_lines(run.forecast, step_s):
            _log.info("%s", line)
    tokens_per_s = facts.num_targets / seconds
    metrics = StepMetrics(
        step=result.step,
        last_step=end.last_step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=facts.rates.adamw,
        muon_lr=facts.rates.muon,
        targets=facts.progress.targets,
        tokens_per_s=tokens_per_s,
        mfu=run.flops.mfu(tokens_per_s, group.world_size),
        loader_wait_s=facts.loader_wait_s,
        seconds=seconds,
        run_s=run.clock.seconds,
        left_s=end.left_s(result.step, run.clock.seconds),
        measures=dict(zip(task.step_metrics, result.measures, strict=True)),
        has_perplexity=task.has_perplexity,
    )
    state.train_losses.add(result.loss)
    if result.step == 1 and group.is_main and (run.extension.custom_loss is not None or run.extension.has_step):
        warning = initial_loss_warning(result.loss, facts.progress.evaluations, run.context.manifest.vocab_size)
        if warning:
            _log.warning("%s", warning)
    metrics = state.monitor.train(metrics)
    state.monitor.layers(run.observer.reading(result.step))
    for adjustment in run.adjuster.adjustments.beginning_at(result.step):
        run.adjuster.announce(adjustment, result.step, after=result.step - 1)
    if state.ledger is not None:
        start = facts.progress.rows - len(facts.rows)
        state.ledger.commit(step=result.step, start=start, rows=facts.rows, targets=facts.num_targets, applied=result.applied)
    state.ending.step = result.step
    state.monitor.slow_rank(result.step, run.stragglers.observe(result.own_times, seconds))
    return metrics
