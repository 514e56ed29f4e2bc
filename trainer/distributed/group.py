"""The group of ranks: who this process is, and the few collectives that training needs. One rank alone needs no group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from common.errors import ConfigError, ExitCode, ProjectError, exit_code_of
from trainer.distributed.devices import num_gpus
from trainer.distributed.joining import stoppable_wait
from trainer.distributed.network import STORE_VARIABLE, keep_private

__all__ = ["LET_GO_S", "Group", "RemoteError", "joined_group"]

_ValueT = TypeVar("_ValueT")
_TIMEOUT = timedelta(minutes=10)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
LET_GO_S = 0.1
"""Seconds after which a collective of gloo has let go of its tensors: see `joined_group`."""


class RemoteError(ProjectError):
    """Another rank failed and says why; this one ends with its exit code, silently where both are on one node."""

    def __init__(self, code: int, *, same_node: bool) -> None:
        super().__init__("" if same_node else "a rank of another node has ended the run; the log of that node says why")
        self.exit_code = ExitCode(code)


@dataclass(frozen=True)
class Group:
    """This process among the ranks of a run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int = 1
    """Ranks on this machine."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone writes the run directory."""
        return self.rank == 0

    def has_here(self, rank: int) -> bool:
        """Whether a rank is on this node."""
        first = self.rank - self.local_rank
        return first <= rank < first + self.local_world_size

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, on every rank, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        if self.world_size == 1:
            return value
        values = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values.item())

    def exchange(self, values_P: Tensor, out: Tensor) -> Tensor:
        """`out`: this rank's shares, one from each rank in their order; a share is one of W equal parts of `values_P`."""
        dist.all_to_all_single(out, values_P)
        return out

    def gather(self, share_C: Tensor, out: Tensor) -> Tensor:
        """`out`: the shares of all ranks, one after the other."""
        _all_gather(out, share_C)
        return out

    def on_main(self, action: Callable[[], _ValueT]) -> _ValueT:
        """Runs `action` on rank 0 and gives its result to every rank; an error there is raised on every rank.

        The result travels pickled between the ranks of this run, so it must be small; nothing of it touches a file.
        """
        if self.world_size == 1:
            return action()
        if not self.is_main:
            received: list[tuple[_ValueT, int]] = [None]  # type: ignore[list-item]  # filled by the broadcast
            dist.broadcast_object_list(received, src=0)
            value, code = received[0]
            if code:
                raise RemoteError(code, same_node=self.has_here(0))
            return value
        try:
            value = action()
        except Exception as error:
            dist.broadcast_object_list([(None, int(exit_code_of(error)))], src=0)
            raise
        dist.broadcast_object_list([(value, 0)], src=0)
        return value


@contextmanager
def joined_group(device: str, slow_s: float = 0.0) -> Iterator[Group]:
    """Joins the group that torchrun's variables describe, and leaves it at the end.

    Args:
        device: `auto`, `cpu` or `cuda`.
        slow_s: how long one rank may take for what the others wait for; ten minutes if that is more.

    Raises:
        ConfigError: torch sees no GPU, though `device` or the machine says that there is one, or fewer GPUs than local ranks.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    keep_private(os.environ)
    if world_size > 1:
        timeout = max(_TIMEOUT, timedelta(seconds=slow_s))
        with stoppable_wait():
            dist.init_process_group(
                "nccl" if chosen.type == "cuda" else "gloo",
                timeout=timeout,
                store=_private_store(world_size, timeout),
                rank=rank,
                world_size=world_size,
                device_id=chosen if chosen.type == "cuda" else None,
            )
    try:
        yield Group(rank, world_size, local_rank, chosen, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    finally:
        if world_size > 1:
            # Gloo's thread needs the interpreter's lock to let go of the last collective's tensors. DDP's reducer, when it
            # is destroyed, waits for that thread with the lock held: about one stop in three hung for ever (torch 2.13.0,
            # two ranks, November 2026).
            time.sleep(LET_GO_S)
            dist.destroy_process_group()


def _private_store(world_size: int, timeout: timedelta) -> Store | None:
    """Where ranks of one node find each other without a socket; None under a torchrun of other makes, which has a store itself."""
    if not (folder := os.environ.get(STORE_VARIABLE)):
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what an earlier attempt has left must not be read
    store = FileStore(str(Path(folder, f"attempt-{attempt}")), world_size)
    store.set_timeout(timeout)
    return store


def _device(wanted: str, local_rank: int) -> torch.device:
    available = num_gpus(wanted)
    if not available:
        return torch.device("cpu")
    if local_rank >= available:
        raise ConfigError(f"local rank {local_rank} has no GPU: torch sees {available}; start fewer ranks on this node")
    return torch.device("cuda", local_rank)
