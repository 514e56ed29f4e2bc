"""Training, read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import StoppedBySignal
from trainer.config import TrainConfig
from trainer.data.batch import GlobalBatch
from trainer.metrics import StepFacts
from trainer.optim.optimizers import set_learning_rate
from trainer.optim.schedule import learning_rate_factor
from trainer.run.progress import Progress
from trainer.training.setup import opened_session
from trainer.training.step import OutOfMemoryAloneError, StepResults, train_step
from trainer.training.training_run import GoBack, Session

__all__ = ["train"]


def train(config: TrainConfig, *, trust_extension: bool = True) -> str:
    """Trains until the first limit, from the newest checkpoint if there is one.

    Args:
        config: the settings.
        trust_extension: note that this user has trained with the extension, if there is one: see `trainer.extensions.trust`.

    Returns:
        `weights sha256:… steps N`, the same on every rank.

    Raises:
        StoppedBySignal: SIGTERM or SIGINT came; the state is saved.
        ProjectError: see `opened_session` and `train_on`.
    """
    with opened_session(config, trust_extension=trust_extension) as session:
        progress, stopped = train_until_done(session)
        session.report_memory()
        digest = session.weights_digest()
        session.complete(progress, digest, stopped=stopped)
        if stopped:
            session.raise_alert()
            message = f"saved step {progress.step} in {config.run}; run the same command again to go on"
            raise StoppedBySignal(message if session.group.local_rank == 0 else "")
        return f"weights {digest} steps {progress.step}"


def train_until_done(session: Session) -> tuple[Progress, bool]:
    """The loop itself; returns the last counters, all saved, and whether a signal ended it."""
    progress, stopped, done = session.resumed, False, False
    clock = Clock(progress.seconds)
    session.extension.train_start(session.view(progress))
    while not done:
        try:
            with session.batches(progress) as batches:
                progress, stopped = train_on(session, batches, progress, clock)
            done = True
        except GoBack as request:
            with clock.paused(), session.heartbeat.phase("loading"):
                progress = session.go_back(request)
        except OutOfMemoryAloneError as error:
            session.leave_smaller_micro(error.step)
            raise
    session.heartbeat.at("save")
    session.finish_saves()
    session.extension.train_end(session.view(progress))
    return progress, stopped


def train_on(session: Session, batches: Iterator[GlobalBatch], progress: Progress, clock: Clock) -> tuple[Progress, bool]:
    """Trains on the batches until a limit or a signal; returns the last counters, saved, and whether it was a signal.

    Raises:
        GoBack: the guard wants to go back, or a step has to be made again.
        GuardError: the guard stops the training.
    """
    config, plan, stopped = session.config, session.plan, False
    results: StepResults[StepFacts] = StepResults(lag=1 if session.group.device.type == "cuda" else 0)
    session.own_timer.begin()
    while True:
        if stopped or evaluation_due(session, progress) or save_due(session, progress):
            progress, asked_to_stop = settle(session, results, progress, clock, everything=True)
            stopped = stopped or asked_to_stop
            with clock.paused(), session.own_timer.paused():
                if evaluation_due(session, progress) and not stopped:
                    with session.heartbeat.phase("evaluate"):
                        progress = session.evaluate(progress)
                    stopped = progress.evaluated_step != progress.step
                if save_due(session, progress) or (stopped and session.saved_step != progress.step):
                    with session.heartbeat.phase("save"):
                        progress = session.save(progress)
        if stopped or plan.finished(progress):
            return progress, stopped

        session.heartbeat.at("data", progress.step + 1)
        waiting_since = time.monotonic()
        batch = next(batches)
        waited_s = time.monotonic() - waiting_since
        session.own_timer.waited_for_data(waited_s)
        session.heartbeat.at("forward")
        rate = config.optim.lr * learning_rate_factor(config.schedule, plan.decay_steps, progress.step) * session.guard.lr_factor
        set_learning_rate(session.training.optimizers, rate)
        pending = train_step(
            session.training,
            batch,
            config,
            session.group,
            step=progress.step + 1,
            stop_requested=session.stop_requested,
            seconds=clock.seconds,
            save_failed=session.saver.failed,
            acknowledged_step=session.saver.acknowledged_step,
            limits=session.guard.thresholds(progress.step + 1),
            before_exchange=session.before_exchange,
            after=results.newest,
            observer=session.observer,
        )
        session.own_timer.begin()
        session.heartbeat.at("report")
        if session.replicas.due(progress.step + 1):
            session.replicas.begin(progress.step + 1)
        # A rank that could not read its rows does not know how many targets they have: near a limit on them none goes ahead.
        may_end = plan.may_reach_targets(progress, config.batch.global_rows * session.manifest.row_length)
        progress = progress.after_step(end=batch.start + len(batch.rows), targets=batch.num_targets)
        if session.average is not None:
            session.average.update(progress.step, pending.skip)
        results.add(pending, StepFacts(progress, rate, batch.num_targets, waited_s, batch.rows))
        progress, stopped = settle(session, results, progress, clock, everything=may_end)


def settle(
    session: Session, results: StepResults[StepFacts], progress: Progress, clock: Clock, *, everything: bool = False
) -> tuple[Progress, bool]:
    """Reads the results that are due, judges and reports them; returns the counters with the agreed time, and whether to stop."""
    stopped = False
    for result, facts in results.due(everything=everything):
        session.check_void(result, facts)
        progress = progress.at(result.seconds)
        metrics = session.report(result, facts, clock.lap())
        session.replicas.read(result.step)
        session.judge(result, facts)
        session.extension.step_end(session.view(facts.progress), metrics)
        session.follow_saves(result)
        stopped = stopped or result.stop_votes > 0
    return progress, stopped


class Clock:
    """Seconds of training: evaluations and saves do not count."""

    def __init__(self, seconds: float) -> None:
        self._zero = time.monotonic() - seconds
        self._last_lap = seconds

    @property
    def seconds(self) -> float:
        """Since the run began, over all resumes."""
        return time.monotonic() - self._zero

    def lap(self) -> float:
        """Since the lap before."""
        now = self.seconds
        lap, self._last_lap = now - self._last_lap, now
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is none."""
        begun = time.monotonic()
        yield
        self._zero += time.monotonic() - begun


def evaluation_due(session: Session, progress: Progress) -> bool:
    """True on the first and last step and every so many between, unless this step has been evaluated already."""
    due = progress.step % session.config.eval.every_steps == 0 or session.plan.finished(progress)
    return due and progress.evaluated_step != progress.step


def save_due(session: Session, progress: Progress) -> bool:
    """True every so many steps or minutes, at a new best and on the last step, unless the state is saved already."""
    if session.saved_step == progress.step or (progress.step == 0 and not session.plan.finished(progress)):
        return False
    settings = session.config.checkpoint
    return (
        progress.step % settings.every_steps == 0
        or progress.seconds - progress.saved_seconds >= settings.every_minutes * 60
        or progress.step == progress.best_step
        or session.plan.finished(progress)
    )
