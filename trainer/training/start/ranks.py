"""Joins this rank to the group: limits of the process, the check of the machine, the log, and the watchdog."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from common.redaction import RedactingFormatter
from common.terminal import LineHandler
from trainer.config.health import WatchdogConfig
from trainer.distributed.devices import num_gpus
from trainer.distributed.group import Group, joined_group
from trainer.doctor.machine import check_start
from trainer.watchdog.heartbeat import HeartbeatWriter, Timeouts
from trainer.watchdog.processes import ProcessId
from trainer.watchdog.watch import watched


@contextmanager
def joined_ranks(device: str, slow_s: float, secrets: Iterable[str]) -> Iterator[Group]:
    """Check the machine, and join the group of ranks. On ranks other than 0 only warnings are logged."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # an open shard takes two files
    if os.environ.get("LOCAL_RANK", "0") == "0":
        check_start(min(num_gpus(device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with joined_group(device, slow_s) as group:
        handler = LineHandler()
        handler.setFormatter(RedactingFormatter("%(message)s", secrets))
        logging.basicConfig(level=logging.INFO if group.is_main else logging.WARNING, handlers=[handler])
        yield group


def watched_rank(run: Path, settings: WatchdogConfig, group: Group) -> AbstractContextManager[HeartbeatWriter]:
    """Yield the heartbeat of this rank. From here on the watchdog detects a rank without progress. All ranks must call this."""
    enabled = is_watched(settings)
    return watched(
        run,
        Timeouts(settings.stall_s, settings.slow_s),
        rank=group.rank,
        local_rank=group.local_rank,
        processes=_processes_here(group) if enabled else (),
        num_ranks=group.world_size,
        enabled=enabled,
    )


def is_watched(settings: WatchdogConfig) -> bool:
    return settings.enabled == "on" or (settings.enabled == "auto" and "RANK" in os.environ)


def _processes_here(group: Group) -> list[ProcessId]:
    """Return the processes of the ranks on this node, in the order of the ranks. All ranks must call this."""
    own = ProcessId.own()
    known = torch.tensor([own.pid, own.started], dtype=torch.int64, device=group.device)
    if group.world_size > 1:
        known = group.gather(known, known.new_empty(2 * group.world_size))
    first = group.rank - group.local_rank
    return [ProcessId(*pair) for pair in known.view(-1, 2)[first : first + group.local_world_size].tolist()]
