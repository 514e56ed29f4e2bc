"""Runs a function on several ranks at once, each a process with one thread, joined by gloo over a file."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from trainer.distributed.group import LET_GO_S, Group

__all__ = ["RankError", "run_ranks"]

_ResultT = TypeVar("_ResultT")

_NOT_CONNECTED = "Gloo connectFullMesh failed"
_GRACE_S = 2.0


class RankError(RuntimeError):
    """Ranks failed or did not end in time; the message holds the traceback of each that failed."""


def run_ranks(function: Callable[..., _ResultT], num_ranks: int, *arguments: Any, timeout_s: float = 120) -> list[_ResultT]:
    """What `function(group, *arguments)` returns on each rank, in the order of the ranks.

    The processes are forked from a server that has imported torch and nothing else, so that they start in a tenth of a second and
    inherit no threads. They find each other through a file, so that runs side by side never meet. All of them have ended, or
    were killed, when this returns.

    Args:
        function: defined at the top level of a module; `group` is the rank's `trainer.distributed.group.Group`.
        num_ranks: number of processes.
        arguments: picklable values, the same for each rank; so must be what the function returns.
        timeout_s: seconds until all are killed.

    Raises:
        RankError: a rank raised an error, died or was too slow. The others are killed, as they may wait for it. If gloo could not
            connect the ranks (seen twice in full runs of the tests, torch 2.13), they are started once more.
    """
    try:
        return _attempt(function, num_ranks, arguments, timeout_s)
    except RankError as error:
        if _NOT_CONNECTED not in str(error):
            raise
    return _attempt(function, num_ranks, arguments, timeout_s)


def _attempt(function: Callable[..., _ResultT], num_ranks: int, arguments: Sequence[Any], timeout_s: float) -> list[_ResultT]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as directory:
        connections, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            settings = (sender, Path(directory) / "store", rank, num_ranks, function, arguments)
            process = context.Process(target=_run_rank, args=settings, name=f"rank-{rank}", daemon=True)
            process.start()
            sender.close()
            connections.append(receiver)
            processes.append(process)
        try:
            results = _results(connections, timeout_s)
            for process in processes:
                process.join(_GRACE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return results


def _run_rank(
    sender: Connection, store: Path, rank: int, num_ranks: int, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    # Gloo would otherwise look up the host's name, which need not resolve in a container.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5)
        )
        result = function(Group(rank, num_ranks, rank, torch.device("cpu"), num_ranks), *arguments)
        # Plain pickle: multiprocessing would share a tensor's memory, which ends with this process.
        sender.send_bytes(pickle.dumps((result, "")))
    except BaseException:
        sender.send_bytes(pickle.dumps((None, traceback.format_exc())))
    time.sleep(LET_GO_S)  # see trainer.distributed.group.joined_group
    with suppress(Exception):
        dist.destroy_process_group()


def _results(connections: Sequence[Connection], timeout_s: float) -> list[Any]:
    """One result from each connection; once one has failed, the others have a moment to say why they did too."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(waiting), left_s):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                results[rank], failure = pickle.loads(connection.recv_bytes())
            except EOFError:
                failure = "the process died without a word"
            if failure:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        raise RankError("\n".join(f"rank {rank}:\n{failures[rank]}" for rank in sorted(failures)))
    if waiting:
        raise RankError(f"ranks {sorted(waiting.values())} were still running after {timeout_s} s")
    return [results[rank] for rank in range(len(connections))]
