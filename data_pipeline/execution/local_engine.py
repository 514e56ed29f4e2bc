from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.errors import WorkerError
from common.hardware import num_oom_kills, why_killed

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_AHEAD = 2  # for each worker: enough to keep it busy, few enough to limit the memory of waiting results
_OUT_OF_MEMORY = (
    "finished work is kept: run the same command again with fewer --workers, "
    "or smaller --partition_bytes or --packing.window_tokens"
)


class Engine(Protocol):
    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the results of `function` for every task, in the order of the tasks."""


class _Worker(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - its name in `multiprocessing`
        # A worker imports the main module if it has a name. A script that calls `trainer.prepare` would run again in each worker.
        of_main = vars(sys.modules["__main__"])
        names: dict[str, Any] = {name: of_main.pop(name) for name in ("__file__", "__spec__") if name in of_main}
        of_main["__spec__"] = None
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            del of_main["__spec__"]
            of_main.update(names)


class _Context(ForkServerContext):
    Process = _Worker


class _Inline:
    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        try:
            yield from map(function, tasks)
        except MemoryError:
            raise WorkerError(f"memory ran out; {_OUT_OF_MEMORY}") from None


class _Pool:
    """Worker processes, new for each stage, so the memory, models and caches of a stage are freed at its end."""

    def __init__(self, num_workers: int) -> None:
        # Workers are forked from a new server process: a fork of this process, which has threads, can hang.
        self._context = _Context()
        self._context.set_forkserver_preload(["data_pipeline.prepare"])
        self._num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        executor = self._executor = ProcessPoolExecutor(self._num_workers, self._context, initializer=_begin_worker)
        running: deque[Future[Result]] = deque()
        oom_kills = num_oom_kills()
        try:
            for task in tasks:
                running.append(executor.submit(function, task))
                if len(running) >= self._num_workers * _TASKS_AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            reason = why_killed(oom_kills) or "most likely for lack of memory"
            raise WorkerError(f"a worker process was killed: {reason}; {_OUT_OF_MEMORY}") from None
        except MemoryError:
            raise WorkerError(f"memory ran out in a worker process; {_OUT_OF_MEMORY}") from None
        executor.shutdown()
        self._executor = None

    def terminate(self) -> None:
        """Terminate running tasks. Their unfinished results are not used, because only files with their final name count."""
        if self._executor is not None:
            for process in list((self._executor._processes or {}).values()):
                process.terminate()
            self._executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def open_engine(num_workers: int) -> Iterator[Engine]:
    """Yield an engine. With 1 worker, the tasks run in this process."""
    if num_workers == 1:
        yield _Inline()
        return
    pool = _Pool(num_workers)
    try:
        yield pool
    finally:
        pool.terminate()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals the whole group, but the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # if memory runs out, the kernel kills a worker, and the main process can report it
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
