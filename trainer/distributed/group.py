"""The group of ranks: the rank of this process, and the collectives that training needs. A single rank needs no process group."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
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

from common.errors import ConfigError, ExitCode, PreparedDataError, ProjectError, exit_code_of
from common.files import UnusableFileError, read_input, write_atomic
from trainer.distributed.devices import num_gpus
from trainer.distributed.network import STORE_VARIABLE, keep_private

OTHERS_S = 5.0
"""Seconds for which a rank still waits for the others after a stop request. If they join in time, the run stops as usual."""
_POLL_S = 0.1
_ValueT = TypeVar("_ValueT")
_TIMEOUT = timedelta(minutes=10)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
TEARDOWN_DELAY_S = 0.1  # seconds after which gloo has released the tensors of a finished collective: see `joined_group`


@contextmanager
def stoppable_wait(others_s: float = OTHERS_S) -> Iterator[None]:
    """End this process with STOPPED if a stop request arrives during the wait for other ranks and the wait lasts `others_s` longer.
    No work is lost, because no step was trained. If the wait ends sooner, the signal stays pending. Only signals that this
    thread blocks are handled: the launcher's ranks block SIGTERM and SIGINT.
    """
    numbers = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}
    if not numbers:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            found = signal.sigtimedwait(numbers, _POLL_S)
            if found is None:
                continue
            if not ended.wait(others_s):
                name = signal.Signals(found.si_signo).name
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    sys.stderr.write(f"stopped: {name} received before all ranks had started; nothing was trained\n")
                    sys.stderr.flush()
                os._exit(ExitCode.STOPPED)
            os.kill(os.getpid(), found.si_signo)  # blocked in all threads, so it is pending again
            return

    thread = threading.Thread(target=watch, name="stop-requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class RemoteError(ProjectError):
    """Another rank failed. This rank ends with the same exit code, and without a message if the other rank is on this node."""

    def __init__(self, code: int, *, same_node: bool) -> None:
        super().__init__("" if same_node else "a rank on another node ended the run; see the log of that node for the reason")
        self.exit_code = ExitCode(code)


@dataclass(frozen=True)
class Group:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int = 1  # number of ranks on this node

    @property
    def is_main(self) -> bool:
        # the only rank that writes the run directory
        return self.rank == 0

    def has_here(self, rank: int) -> bool:
        first = self.rank - self.local_rank
        return first <= rank < first + self.local_world_size

    def sum(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def smallest(self, value: int) -> int:
        if self.world_size == 1:
            return value
        values = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values.item())

    def exchange(self, values_P: Tensor, out: Tensor) -> Tensor:
        """Send each rank one of W equal parts of `values_P`. Fill `out` with the W parts for this rank, in rank order."""
        dist.all_to_all_single(out, values_P)
        return out

    def gather(self, share_C: Tensor, out: Tensor) -> Tensor:
        _all_gather(out, share_C)
        return out

    @property
    def num_nodes(self) -> int:
        # each has as many ranks as this one
        return -(-self.world_size // self.local_world_size)

    def on_all(self, action: Callable[[], _ValueT]) -> _ValueT:
        """Run `action` on every rank and return the own result. If it fails on any rank, every rank raises an error.

        A rank raises its own error; the others raise a `RemoteError` with the exit code of the lowest failed rank.
        """
        try:
            value, error = action(), None
        except Exception as found:
            error = found
        code = torch.tensor([0 if error is None else int(exit_code_of(error))], dtype=torch.int64, device=self.device)
        codes = self.gather(code, code.new_empty(self.world_size)).tolist() if self.world_size > 1 else []
        if error is not None:
            raise error
        for rank, failed in enumerate(codes):
            if failed:
                raise RemoteError(failed, same_node=self.has_here(rank))
        return value

    def on_main(self, action: Callable[[], _ValueT]) -> _ValueT:
        """Run `action` on rank 0 and return its result on every rank. An error on rank 0 is raised on every rank.

        The result is sent to the other ranks as a pickle, so it must be small. It is never written to a file.
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
    """Join the process group that torchrun's environment variables describe, and leave it at the end. After an error the group is
    not destroyed, because NCCL may then wait for ranks that have ended, or end the process before the error is printed;
    `end_at_once` closes its connections. `slow_s` is the timeout of a collective, at least ten minutes. Raises ConfigError if
    there is no GPU for this rank.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device("cpu")
    if available := num_gpus(device):
        if local_rank >= available:
            raise ConfigError(f"local rank {local_rank} has no GPU: torch sees {available}; start fewer ranks on this node")
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    keep_private(os.environ)
    if world_size > 1:
        timeout = max(_TIMEOUT, timedelta(seconds=slow_s))
        store: Store | None = None  # of another launcher, unless the ranks of one node meet without a socket
        if folder := os.environ.get(STORE_VARIABLE):
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the files of an earlier attempt must not be read
            store = FileStore(str(Path(folder, f"attempt-{attempt}")), world_size)
            store.set_timeout(timeout)
        with stoppable_wait():
            dist.init_process_group(
                "nccl" if chosen.type == "cuda" else "gloo",
                timeout=timeout,
                store=store,
                rank=rank,
                world_size=world_size,
                device_id=chosen if chosen.type == "cuda" else None,
            )
    try:
        yield Group(rank, world_size, local_rank, chosen, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    finally:
        if world_size > 1:
            # Gloo's thread needs the GIL to release the tensors of the last collective. The destructor of DDP's reducer waits for
            # that thread while it holds the GIL. Without this pause about one exit in three deadlocked (torch 2.13.0, two ranks,
            # November 2026). An error needs the pause too, because DDP is destroyed with the frames of its traceback.
            time.sleep(TEARDOWN_DELAY_S)
    if world_size > 1:  # not after an error: see the docstring
        dist.destroy_process_group()


WAIT_S = 90.0  # longest wait for the file of rank 0. NFS may remember for 60 s that a folder does not exist (`acdirmax` in nfs(5)).
_MARK_POLL_S = 0.2
_PREFIX, _NONCE_BYTES = ".shared-", 8  # a name in `_FILES` of trainer/runs/layout.py
_MAX_BYTES = 64


def check_shared(run: Path, group: Group) -> None:
    # On several nodes all must have the same run folder and the same prepared data. Otherwise each node would write its heartbeats
    # into another folder, and a restart could find checkpoints on one node only.
    # The name of the file is new each time, because a network file system may remember that a name does not exist.
    if group.num_nodes == 1:
        return
    name = group.on_main(lambda: _write_mark(run))
    try:
        group.on_all(lambda: _wait_for(run / name) if group.local_rank == 0 else None)
    finally:
        if group.is_main:
            (run / name).unlink(missing_ok=True)


def check_same_data(data: Path, root_digest: str, group: Group) -> None:
    if group.num_nodes == 1:
        return
    wanted = group.on_main(lambda: root_digest)

    def compare() -> None:
        if root_digest != wanted:
            raise PreparedDataError(
                f"{data}: on this node ({socket.gethostname()}) the root digest is {root_digest}, but on the node of rank 0 it is "
                f"{wanted}; all nodes need the same prepared data: copy that folder to this node, or share it"
            )

    group.on_all(compare)


def _write_mark(run: Path) -> str:
    for left in run.glob(f"{_PREFIX}{'[0-9a-f]' * 2 * _NONCE_BYTES}"):
        left.unlink(missing_ok=True)
    name = f"{_PREFIX}{secrets.token_hex(_NONCE_BYTES)}"
    write_atomic(run / name, name.encode())
    return name


def _wait_for(mark: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    reason = ""
    while not reason or time.monotonic() < deadline:
        try:
            list(mark.parent.iterdir())  # makes NFS ask the server for new entries
            if read_input(mark, _MAX_BYTES, below=mark.parent) == mark.name.encode():
                return
            reason = "it has another content here"
        except (OSError, UnusableFileError) as error:
            reason = str(error)
        time.sleep(_MARK_POLL_S)
    raise ConfigError(
        f"{mark.parent.absolute()} on this node ({socket.gethostname()}) is not the run folder of rank 0: a file that rank 0 wrote "
        f"there is not seen after {WAIT_S:g} s ({reason}). A run on several nodes needs a run folder that all nodes share, such as "
        "NFS or Lustre: mount it at the same path on every node, and name it with --run"
    )
