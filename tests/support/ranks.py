"""Runs a function on several ranks at once. Each rank is a process with one thread; gloo joins the ranks over a file."""

from __future__ import annotations

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

from tests.support.fork_server import forking
from trainer.distributed.group import TEARDOWN_DELAY_S, Group

_ResultT = TypeVar("_ResultT")

_NOT_CONNECTED = "Gloo connectFullMesh failed"
_GRACE_S = 2.0


class RankError(RuntimeError):
    """Ranks failed or did not end in time. The message holds the traceback of each rank that failed."""


def run_ranks(function: Callable[..., _ResultT], num_ranks: int, *arguments: Any, timeout_s: float = 120) -> list[_ResultT]:
    """Return the results of `function(group, *arguments)` on all ranks, in the order of the ranks.

    The processes inherit no threads. They find each other through a file, so tests that run side by side cannot meet. When this
    returns, all processes have ended or were killed.

    Args:
        function: defined at the top level of a module; `group` is the `trainer.distributed.group.Group` of the rank.
        num_ranks: number of processes.
        arguments: picklable values, the same for each rank. The result of the function must be picklable too.
        timeout_s: seconds until all processes are killed.

    Raises:
        RankError: a rank raised an error, died or was too slow. The other ranks are killed, because they may wait for it. If
            gloo could not connect the ranks (seen twice in full runs of the tests, torch 2.13), the ranks are started once more.
    """
    try:
        return _attempt(function, num_ranks, arguments, timeout_s)
    except RankError as error:
        if _NOT_CONNECTED not in str(error):
            raise
    return _attempt(function, num_ranks, arguments, timeout_s)


def _attempt(function: Callable[..., _ResultT], num_ranks: int, arguments: Sequence[Any], timeout_s: float) -> list[_ResultT]:
    context = forking()
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
    # Without this, gloo looks up the host name, which a container may not be able to resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5)
        )
        result = function(Group(rank, num_ranks, rank, torch.device("cpu"), num_ranks), *arguments)
        # Plain pickle: multiprocessing would share the memory of a tensor, which ends with this process.
        sender.send_bytes(pickle.dumps((result, "")))
    except BaseException:
        sender.send_bytes(pickle.dumps((None, traceback.format_exc())))
    time.sleep(TEARDOWN_DELAY_S)  # see trainer.distributed.group.joined_group
    with suppress(Exception):
        dist.destroy_process_group()


def _results(connections: Sequence[Connection], timeout_s: float) -> list[Any]:
    """Return one result from each connection. After a failure, the other ranks get a short time to report their errors too."""
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
