"""Opens a training run: joins the ranks, plans the run, checks it, builds its parts, restores them, and closes them at the end."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from common.redaction import RedactingFormatter, secrets_of
from common.terminal import LineHandler
from trainer.config import TrainConfig
from trainer.config.health import WatchdogConfig
from trainer.distributed.devices import num_gpus
from trainer.distributed.group import Group, joined_group
from trainer.doctor.machine import check_start
from trainer.extensions.loading import load_extension
from trainer.extensions.trust import note_trained_with
from trainer.machine.determinism import configure_determinism
from trainer.runs.clock import Clock
from trainer.runs.signals import stop_signal
from trainer.training.run_end import StopRequests
from trainer.training.start.banner import introduce
from trainer.training.start.build import built_and_restored
from trainer.training.start.check import check
from trainer.training.start.earlier import is_new_branch
from trainer.training.start.parts import put_together
from trainer.training.start.plan import plan_start
from trainer.training.start.record import open_record
from trainer.training.training_run import TrainingRun
from trainer.watchdog.heartbeat import HeartbeatWriter, Timeouts
from trainer.watchdog.processes import ProcessId
from trainer.watchdog.watch import is_watched, watched


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
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # an open shard takes two files
        if os.environ.get("LOCAL_RANK", "0") == "0":
            check_start(min(num_gpus(config.device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        group = stack.enter_context(joined_group(config.device, config.watchdog.slow_s))
        handler = LineHandler()
        handler.setFormatter(RedactingFormatter("%(message)s", secrets_of(config.log.mlflow_uri or "")))
        logging.basicConfig(level=logging.INFO if group.is_main else logging.WARNING, handlers=[handler])
        stop = StopRequests(signal, group)
        if trust_extension and extension.digest is not None and group.is_main:
            note_trained_with(extension.digest)
        plan = plan_start(stack, config, group, extension)
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
        run = put_together(stack, plan, continued, restored, stop, heartbeat, clock)
        del restored
        with clock.paused():
            introduce(run, continued, differences)
        yield run
