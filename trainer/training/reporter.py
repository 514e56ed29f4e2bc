"""Reports the results of a step to sinks and ledger, and evaluates the model: loss, convergence, samples and their scores."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext

from common.errors import ConfigError, ProjectError
from data_pipeline.dataset.shards import ShardError
from trainer.data.bad_shards import as_project_error, shared_faults
from trainer.evaluation.evaluate import EvaluationStopped
from trainer.evaluation.evaluate import evaluate as evaluate_rows
from trainer.evaluation.tally import Evaluation
from trainer.extensions.hooks import initial_loss_warning
from trainer.health.convergence import is_comparable, judge_convergence, with_convergence
from trainer.inference.samples import prompts_of, sample_and_score
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Continuation, TextModel
from trainer.machine.memory import is_out_of_memory
from trainer.metrics.sinks.base import StepFacts, StepMetrics
from trainer.parallel.fsdp import gathered
from trainer.planning.forecast import time_lines
from trainer.runs.events import SampleEvent, ScoresEvent
from trainer.runs.state import Progress
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
    state.ending.reached(result.step)
    state.monitor.slow_rank(result.step, run.stragglers.observe(result.own_times, seconds))
    return metrics


def evaluate(run: TrainingRun, progress: Progress) -> Progress:
    """If a stop is requested meanwhile, the result is discarded, and the resumed run evaluates this step."""
    trainable, monitor, step = run.trainable, run.state.monitor, progress.step
    config, extension, group = run.context.config, run.extension, run.context.group
    try:
        with trainable.average.swapped_in() if trainable.average else nullcontext():
            evaluation = _evaluation(run, step)
            # Without a finite loss there are no probabilities to sample from.
            samples = _samples(run, step) if trainable.task.writes and math.isfinite(evaluation.loss) else None
            # Rank 0 may need long for its samples. The others wait here and not in the next step.
            group.smallest(0)
    except EvaluationStopped:
        return progress
    after = progress.after_evaluation(evaluation.loss, run.state.train_losses.take())
    custom_loss = extension.custom_loss is not None or extension.has_step or not trainable.task.comparable
    comparable = is_comparable(config.loss, custom_loss=custom_loss)
    monitor.write(with_convergence(evaluation.event(step), after.evaluations, config.eval, comparable=comparable))
    if evaluation.measured is not None:
        monitor.write(evaluation.measured(step))
    if samples is not None:
        texts, scores = samples
        events = [SampleEvent(step, one.prompt, one.text) for one in texts]
        monitor.samples(step, events, None if scores is None else ScoresEvent(step, scores))
    monitor.convergence(judge_convergence(after.evaluations, config.eval))
    monitor.write(extension.notify("on_evaluate", run.view(after), evaluation))
    return after


def _evaluation(run: TrainingRun, step: int) -> Evaluation:
    """Return the validation loss after a step. If rows cannot be read twice, put their shards into quarantine or stop."""
    context, val_rows = run.context, run.data.val_rows
    tried: set[str] = set()
    faults: dict[str, ProjectError] = {}

    def note(error: ShardError | OSError) -> None:
        shard = val_rows.shard_of(error)
        assert shard is not None
        faults[shard] = as_project_error(error)

    while True:
        faults.clear()
        rows = val_rows.without(run.adjuster.adjustments.quarantined(step), note)
        is_asked, measures = lambda: run.stop.requested, run.trainable.task.measures
        try:
            evaluation = evaluate_rows(run.trainable.loss, context, rows, run.heartbeat.beat, run.grouping, is_asked, measures)
        except Exception as error:
            if context.config.parallel != "fsdp" or not is_out_of_memory(error):
                raise
            num_rows = context.config.eval.micro_batch_size or context.config.batch.micro_rows
            raise ConfigError(
                f"the evaluation ran out of memory with {num_rows} rows in a forward pass; "
                "set eval.micro_batch_size to fewer rows, then run the same command again"
            ) from error
        found = shared_faults(faults, context.manifest, context.group)
        if not found:
            return evaluation
        if found.keys() <= tried:
            adjustment = run.adjuster.quarantine(found, faults, step)
            run.adjuster.announce(adjustment, step, after=step)
        tried |= found.keys()
        time.sleep(next(iter(context.config.loader.retry_waits_s), 0.0))


def _samples(run: TrainingRun, step: int) -> tuple[list[Continuation], dict[str, float | None] | None] | None:
    config, group, tokenizer = run.context.config, run.context.group, run.data.tokenizer
    blank = run.adjuster.adjustments.quarantined(step)
    rows = run.data.val_rows.without(blank, lambda _error: None)  # rows that cannot be read give no prompt
    prompts = group.on_main(lambda: prompts_of(config.eval, rows, tokenizer))
    if not prompts or not (group.is_main or config.parallel == "fsdp"):
        return None
    seed = (config.seed + step) % (1 << 63)
    sampling = Sampling(max_tokens=config.eval.sample_tokens, temperature=config.eval.sample_temperature, seed=seed)
    source = TextModel(run.trainable.model, tokenizer, config.model.context)
    return gathered(run.trainable.module, lambda: sample_and_score(source, prompts, sampling, config))
