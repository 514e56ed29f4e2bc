"""Runs tasks on a Ray cluster. This is the only module that imports Ray, which is an optional dependency.

All nodes must have the output folder under the same path, and the input too unless it is remote. Tasks bring everything else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError, WorkerError

ray: Any = importlib.import_module("ray") if importlib.util.find_spec("ray") else None  # optional: requirements-ray.lock

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_AHEAD = 2  # for each worker: enough to keep it busy, few enough to stop soon
_MAX_RETRIES = 3  # of a task whose node or worker died; a repeated task overwrites its unfinished files


class _Ray:
    def __init__(self, num_workers: int) -> None:
        self._ahead = num_workers * _TASKS_AHEAD

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        remote = ray.remote(max_retries=_MAX_RETRIES, num_cpus=1)(function)
        running: deque[Any] = deque()
        try:
            for task in tasks:
                running.append(remote.remote(task))
                if len(running) >= self._ahead:
                    yield ray.get(running.popleft())
            while running:
                yield ray.get(running.popleft())
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"a task was lost on the Ray cluster ({type(error).__name__}: {str(error).splitlines()[0]}); finished work is "
                "kept: run the same command again, with smaller --partition_bytes if memory ran out"
            ) from None
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


@contextlib.contextmanager
def open_ray(address: str | None, num_workers: int | None) -> Iterator[_Ray]:
    """Yield an engine on the cluster at `address`. Without it, use the cluster of RAY_ADDRESS, or a new one on this machine."""
    if ray is None:
        raise ConfigError(
            "engine = ray, but Ray is not installed; run `pip install --no-deps --require-hashes -r env/requirements-ray.lock`, "
            "or set engine to local"
        )
    joined = ray.is_initialized()
    if not joined:
        root = Path(__file__).resolve().parents[2]
        packages = [str(root / name) for name in ("common", "data_pipeline")]
        options = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here sends no usage statistics
        try:
            ray.init(address, runtime_env={"py_modules": packages}, log_to_driver=False, logging_level=logging.WARNING, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"ray_address = {address}: no Ray cluster can be reached there: {error}") from None
    try:
        yield _Ray(num_workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        if not joined:
            ray.shutdown()
