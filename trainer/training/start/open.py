"""Opens a training run: joins the ranks, plans the run, checks it, builds its parts, restores them, and closes them at the end."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from common.redaction import RedactingFormatter, secrets_of
from common.settings.load import AUTO
from common.terminal import LineHandler
from trainer.config import TrainConfig, WatchdogConfig, settings_without_effect
from trainer.context import RunContext
from trainer.distributed.devices import num_gpus
from trainer.distributed.group import Group, joined_group
from trainer.doctor.machine import check_start
from trainer.extensions.trust import load_extension, note_trained_with
from trainer.launch.stop_request import stop_signal
from trainer.machine.determinism import configure_determinism
from trainer.machine.environment import ChangedFact, describe_unlocked, lock_name, unlocked_packages_here
from trainer.machine.peak_rates import rate_kind, unknown_mfu
from trainer.model.attention import BACKENDS
from trainer.model.decoder import Decoder
from trainer.planning.forecast import brief_lines
from trainer.runs.clock import Clock
from trainer.training.run_end import StopRequests
from trainer.training.start.build import built_and_restored
from trainer.training.start.check import Continued, check
from trainer.training.start.parts import put_together
from trainer.training.start.plan import is_new_branch, plan_start, with_micro_batch
from trainer.training.start.record import open_record, take_over_ends
from trainer.training.trainable import Trainable
from trainer.training.training_run import TrainingRun
from trainer.watchdog.heartbeat import HeartbeatWriter, Timeouts
from trainer.watchdog.processes import ProcessId
from trainer.watchdog.watch import is_watched, watched

_log = logging.getLogger(__name__)


def introduce(run: TrainingRun, start: Continued, differences: Sequence[ChangedFact]) -> None:
    """Log the size of model, data and group and the settings without effect.

    `differences` are those of a resumed run from the start before.
    """
    context, manifest, continued = run.context, run.context.manifest, start.newest is not None
    config, group = context.config, context.group
    trained, total = run.trainable.num_trained, run.trainable.num_weights
    some = "" if trained == total else f", of which {trained / 1e6:.3g}M ({trained / total:.2%}) are trained"
    threads = f" with {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}" if group.device.type == "cpu" else ""
    _log.info(
        f"{f'resuming {config.run} at step {run.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{total / 1e6:.2f}M weights{some}, vocabulary {manifest.vocab_size}, {len(run.data.train_rows)} training and "
        f"{len(run.data.val_rows)} validation rows of {manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}{threads}, {config.number_format}"
    )
    if start.before is not None and is_new_branch(start.before.record):
        _log.info("branched off %s at step %d", config.branch.run, run.resumed.step)
    if start.initial is not None and not continued:
        _log.info("the weights are those of step %d of %s", start.initial.step, config.init)
    if differences and group.is_main:  # every rank has them, and other ranks log warnings
        lines = "".join(f"\n  {one.describe()}" for one in differences)
        level, step = logging.WARNING if any(one.changes_bits for one in differences) else logging.INFO, run.resumed.step
        _log.log(level, "resumed at step %s with differences from the previous start (* can change the results):%s", step, lines)
    if not continued and config.recipe == AUTO:
        model, limits = config.model, config.limits
        bounds = {name: getattr(limits, name) for name in ("minutes", "epochs", "steps", "tokens")}
        ends = " or ".join(f"limits.{name} = {value:g}" for name, value in bounds.items() if value is not None)
        _log.info(
            f"recipe auto: {model.layers} layers of width {model.width}, {config.batch.global_batch_size} rows in a step, "
            f"{config.optim.kind}, until {ends}; settings that you give are kept (docs/guide/model-size.md)"
        )
    _log.info("%s; attention %s", run.data.order.description, BACKENDS[context.backend])
    if group.is_main:
        if unlocked := describe_unlocked(lock_name(), unlocked_packages_here()):
            _log.warning("%s; results may differ from those of an installation from the lock", unlocked)
        warn_of_settings(context, run.trainable)
        for line in brief_lines(run.forecast):
            _log.info("%s", line)
    if run.flops.peak is None and group.device.type == "cuda":
        gpu = torch.cuda.get_device_name(group.device)
        _log.info("%s", unknown_mfu(gpu, rate_kind(config.number_format, tf32=config.tf32)))


def warn_of_settings(context: RunContext, trainable: Trainable) -> None:
    for warning in settings_without_effect(
        context.config,
        device=context.group.device.type,
        num_ranks=context.group.world_size,
        watched=is_watched(context.config.watchdog.enabled),
        custom_loss=trainable.extension.custom_loss is not None or trainable.task.sums is not None,
        own_model=not isinstance(trainable.model, Decoder),
    ):
        _log.warning("%s", warning)


def watched_rank(run: Path, settings: WatchdogConfig, group: Group) -> AbstractContextManager[HeartbeatWriter]:
    """Yield the heartbeat of this rank. From here on the watchdog detects a rank without progress. All ranks must call this."""
    enabled = is_watched(settings.enabled)
    own = ProcessId.own()
    known = torch.tensor([own.pid, own.started], dtype=torch.int64, device=group.device)
    if enabled and group.world_size > 1:
        known = group.gather(known, known.new_empty(2 * group.world_size))
    first = group.rank - group.local_rank
    here = known.view(-1, 2)[first : first + group.local_world_size].tolist()  # the ranks on this node, in their order
    return watched(
        run,
        Timeouts(settings.stall_s, settings.slow_s),
        rank=group.rank,
        local_rank=group.local_rank,
        processes=[ProcessId(*pair) for pair in here],
        num_ranks=group.world_size,
        enabled=enabled,
    )


@contextmanager
def opened_run(config: TrainConfig, *, trust_extension: bool = True) -> Iterator[TrainingRun]:
    """Check, build and restore a run. With `trust_extension` the digest of the extension is stored."""
    clock = Clock()
    configure_determinism(config)
    extension = load_extension(config.extension)
    with ExitStack() as stack:
        signal = stack.enter_context(stop_signal())
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        hard = before[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # an open shard takes two files
        if os.environ.get("LOCAL_RANK", "0") == "0":
            check_start(min(num_gpus(config.device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        group = stack.enter_context(joined_group(config.device, config.watchdog.slow_s))
        handler = LineHandler()
        handler.setFormatter(RedactingFormatter("%(message)s", secrets_of(config.log.mlflow_uri or "")))
        logging.basicConfig(level=logging.INFO if group.is_main else logging.WARNING, handlers=[handler])
        stop = StopRequests(signal, group)
        if trust_extension and extension.digests is not None and group.is_main:
            note_trained_with(extension.digests)
        plan = plan_start(stack, config, group, extension)
        plan = with_micro_batch(plan)
        continued = check(plan)

        def saved_step() -> int | None:
            before = continued.before
            return None if before is None or is_new_branch(before.record) else continued.newest

        stop.end_start_if_asked(config.run, saved_step)
        heartbeat = stack.enter_context(watched_rank(config.run, config.watchdog, group))
        restored = built_and_restored(plan, continued)
        stop.end_start_if_asked(config.run, saved_step)
        # Not earlier, because settings that do not fit the checkpoint must leave the files of the run unchanged.
        differences = group.on_main(partial(open_record, plan, continued, restored))
        take_over_ends(plan)
        run = put_together(stack, plan, continued, restored, stop, heartbeat, clock)
        del restored
        with clock.paused():
            introduce(run, continued, differences)
        yield run
