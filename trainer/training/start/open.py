"""Opens a training run: plans it, checks it, builds its parts, restores them, and closes them at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from common.redaction import secrets_of
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.extensions.loading import load_extension
from trainer.extensions.trust import note_trained_with
from trainer.machine.determinism import configure_determinism
from trainer.runs.clock import Clock
from trainer.runs.signals import stop_signal
from trainer.training.start.banner import introduce
from trainer.training.start.build import built_and_restored
from trainer.training.start.check import Continued, check
from trainer.training.start.earlier import is_new_branch
from trainer.training.start.files import open_files
from trainer.training.start.parts import put_together
from trainer.training.start.plan import plan_start
from trainer.training.start.ranks import joined_ranks, watched_rank
from trainer.training.stop import StopRequests
from trainer.training.training_run import TrainingRun


@contextmanager
def opened_run(config: TrainConfig, *, trust_extension: bool = True) -> Iterator[TrainingRun]:
    """Check, build and restore a run. With `trust_extension` the digest of the extension is stored."""
    clock = Clock()
    configure_determinism(config)
    extension = load_extension(config.extension)
    with ExitStack() as stack:
        signal = stack.enter_context(stop_signal())
        group = stack.enter_context(joined_ranks(config.device, config.watchdog.slow_s, secrets_of(config.log.mlflow_uri or "")))
        if trust_extension and extension.digest is not None and group.is_main:
            note_trained_with(extension.digest)
        plan = plan_start(stack, config, group, extension)
        continued = check(plan)
        _end_if_asked(StopRequests(signal, group), plan.context, continued)
        heartbeat = stack.enter_context(watched_rank(config.run, config.watchdog, group))
        restored = built_and_restored(plan, continued)
        _end_if_asked(StopRequests(signal, group), plan.context, continued)
        # Not earlier, because settings that do not fit the checkpoint must leave the files of the run unchanged.
        files = open_files(stack, plan, continued, restored, heartbeat)
        stop = StopRequests(signal, group, files.monitor)
        run = put_together(stack, plan, continued, restored, files, stop, heartbeat, clock)
        del restored
        with clock.paused():
            introduce(run, continued=continued.newest is not None)
        yield run


def _end_if_asked(stop: StopRequests, context: RunContext, continued: Continued) -> None:
    """End the start if a rank was asked to stop. No file of the run has changed yet."""
    if stop.on_any_rank():
        before, newest = continued.before, continued.newest
        newest = context.group.on_main(lambda: None if before is None or is_new_branch(before.record) else newest)
        stop.end_start(context.config.run, newest)
