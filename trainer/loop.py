"""The training loop, from top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from trainer.config import TrainConfig
from trainer.data.batch import GlobalBatch
from trainer.metrics.sinks.base import StepFacts
from trainer.runs.state import Progress
from trainer.training.recovery import GoBack, RepeatStep, go_back, judge
from trainer.training.reporter import evaluate, report
from trainer.training.start.check import NothingToTrain
from trainer.training.start.open import opened_run
from trainer.training.step import CannotContinueError, StepResults, train_step
from trainer.training.training_run import TrainingRun

_log = logging.getLogger(__name__)


def train(config: TrainConfig, *, trust_extension: bool = True) -> str:
    """Train until the first limit, from the newest checkpoint if there is one. Return `weights sha256:… steps N`. With
    `trust_extension` this user's consent to the extension is stored. Raises StoppedBySignal if the state is saved after a
    signal, GuardError if the guard or an alert stopped the training.
    """
    try:
        with opened_run(config, trust_extension=trust_extension) as run:
            progress, stopped = train_until_done(run)
            return run.finish(progress, stopped=stopped)
    except NothingToTrain as reached:
        _log.info("%s", reached)
        return reached.result


def train_until_done(run: TrainingRun) -> tuple[Progress, bool]:
    """Train to the end. Go back if a step must be repeated or the guard asks for a rollback."""
    progress = run.resumed
    run.extension.notify("on_train_start", run.view(progress))
    while True:
        try:
            with run.data.batches(progress, run.adjuster.adjustments) as batches:
                progress, stopped = train_on(run, batches, progress)
            break
        except GoBack as request:  # raised on every rank in the same step
            with run.clock.paused(), run.heartbeat.phase("loading"):
                progress = go_back(run, request)
        except CannotContinueError as error:  # out of memory on this rank alone; the launcher restarts the group
            run.adjuster.note_for_next_start(error.step)
            raise
    run.heartbeat.at("save")
    run.saver.finish()
    run.extension.notify("on_train_end", run.view(progress))
    return progress, stopped


def train_on(run: TrainingRun, batches: Iterator[GlobalBatch], progress: Progress) -> tuple[Progress, bool]:
    """Train on these batches until a limit or a stop request. The state is saved when this function returns."""
    results: StepResults[StepFacts] = StepResults(lag=run.result_lag)
    stopped = False
    run.own_timer.begin()
    while True:
        if stopped or run.evaluation_due(progress) or run.saver.due(progress):
            progress, stop = read_results(run, results, progress, everything=True)
            progress, stopped = evaluate_and_save(run, progress, stopped=stopped or stop)
        if stopped or run.end.finished(progress):
            return progress, stopped
        step = progress.step + 1
        batch, waited_s = run.next_batch(batches, step)
        run.end.cool_down_in_time(progress)
        rates = run.set_learning_rate(progress)
        pending = train_step(run.trainable, batch, run.step_inputs(step), previous=results.newest)
        run.after_step(step, pending)
        near_end = run.end.may_reach_targets(progress)  # then no rank runs ahead of the results
        progress = progress.after_step(end=batch.end, targets=batch.num_targets)
        results.add(pending, StepFacts(progress, rates, batch.num_targets, waited_s, batch.rows))
        progress, stopped = read_results(run, results, progress, everything=near_end)


def evaluate_and_save(run: TrainingRun, progress: Progress, *, stopped: bool) -> tuple[Progress, bool]:
    """Evaluate and save if due. The guard has judged all earlier steps by now, so no checkpoint holds an unjudged step."""
    with run.clock.evaluating_and_saving(), run.own_timer.paused():
        if run.evaluation_due(progress) and not stopped:
            with run.heartbeat.phase("evaluate"):
                progress = evaluate(run, progress)
            stopped = progress.evaluated_step != progress.step  # a stop request interrupted the evaluation
        if run.saver.due(progress) or (stopped and not run.saver.is_saved(progress)):
            with run.heartbeat.phase("save"):
                progress = run.saver.save(progress)
    return progress, stopped


def read_results(
    run: TrainingRun, results: StepResults[StepFacts], progress: Progress, *, everything: bool
) -> tuple[Progress, bool]:
    """Read the results that have arrived, in order; report and judge each. Also return whether a rank was asked to stop."""
    stopped = False
    for result, facts in results.due(everything=everything):
        if result.void:  # a rank had no memory or no data, so this step changed nothing
            raise RepeatStep(result, facts)
        progress = progress.at(result.seconds, result.ending_s)
        metrics = report(run, result, facts)
        run.replica_check.read(result.step)  # raises GuardError
        judge(run, result, facts)  # raises GuardError or RollBack
        run.state.monitor.write(run.extension.notify("on_step_end", run.view(facts.progress), metrics))
        run.saver.follow(result)  # raises StorageError on every rank if a background save failed
        stopped = stopped or result.stop_votes > 0
    return progress, stopped
