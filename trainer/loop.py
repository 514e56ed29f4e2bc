"""Training, read from top to bottom."""

from __future__ import annotations

import time

from data_pipeline.errors import StoppedBySignal
from trainer.config import TrainConfig
from trainer.determinism import seed_step
from trainer.loader import prefetched_batches
from trainer.optim import set_learning_rate
from trainer.record import complete_record
from trainer.schedule import learning_rate_factor
from trainer.session import Session, opened_session, weights_digest
from trainer.state import Progress
from trainer.step import train_step

__all__ = ["train"]


def train(config: TrainConfig) -> str:
    """Trains until the first limit, from the newest checkpoint if there is one.

    Returns:
        `weights sha256:… steps N`, the same on every rank.

    Raises:
        StoppedBySignal: SIGTERM or SIGINT came; the state is saved.
        ProjectError: see `opened_session` and `train_step`.
    """
    with opened_session(config) as session:
        progress, stopped = train_until_done(session)
        digest = weights_digest(session.model)
        status = "stopped" if stopped else "finished"
        session.group.on_main(lambda: complete_record(config.run, status=status, step=progress.step, weights_digest=digest))
        if stopped:
            message = f"saved step {progress.step} in {config.run}; run the same command again to go on"
            raise StoppedBySignal(message if session.group.is_main else "")
        return f"weights {digest} steps {progress.step}"


def train_until_done(session: Session) -> tuple[Progress, bool]:
    """The loop itself; returns the last counters, all saved, and whether a signal ended it."""
    config, group, plan = session.config, session.group, session.plan
    progress, stopped = session.resumed, False
    with prefetched_batches(session.train_rows, config.batch, group, config.seed, progress.rows, config.prefetch) as batches:
        while not stopped:
            if evaluation_due(session, progress):
                progress = session.evaluate(progress)
            if save_due(session, progress):
                progress = session.save(progress)
            if plan.finished(progress):
                break

            started = time.monotonic()
            batch = next(batches)
            waited_s = time.monotonic() - started
            rate = config.optim.lr * learning_rate_factor(config.schedule, plan.decay_steps, progress.step)
            set_learning_rate(session.optimizer, rate)
            seed_step(config.seed, progress.step, group.rank)
            result = train_step(
                session.module,
                session.optimizer,
                session.scaler,
                batch,
                config,
                group,
                stop_requested=session.stop.signal_name is not None,
                seconds=progress.seconds + time.monotonic() - started,
            )
            progress = progress.after_step(rows=len(batch.rows), targets=batch.num_targets, seconds=result.seconds)
            session.report(progress, result, rate, batch.num_targets / (time.monotonic() - started), waited_s)
            stopped = result.stop_votes > 0
    if stopped and not session.is_saved(progress):
        progress = session.save(progress)
    return progress, stopped


def evaluation_due(session: Session, progress: Progress) -> bool:
    """True on the first and last step and every so many between, unless this step has been evaluated already."""
    due = progress.step % session.config.eval.every_steps == 0 or session.plan.finished(progress)
    return due and progress.evaluated_step != progress.step


def save_due(session: Session, progress: Progress) -> bool:
    """True every so many steps or minutes, at a new best and on the last step, unless the state is saved already."""
    if progress.step in (0, session.resumed.step) and not session.plan.finished(progress):
        return False
    settings = session.config.checkpoint
    due = (
        progress.step % settings.every_steps == 0
        or progress.seconds - progress.saved_seconds >= settings.every_minutes * 60
        or progress.step == progress.best_step
        or session.plan.finished(progress)
    )
    return due and not session.is_saved(progress)
