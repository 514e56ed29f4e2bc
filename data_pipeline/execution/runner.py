from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from common.hardware import num_cores
from data_pipeline.config import PrepareConfig
from data_pipeline.execution.local_engine import Engine, open_engine
from data_pipeline.execution.progress import Progress
from data_pipeline.execution.tasks import Task, run_stage

TaskT = TypeVar("TaskT", bound=Task)
ResultT = TypeVar("ResultT")


class Runner:
    def __init__(self, engine: Engine, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress

    def __call__(
        self,
        name: str,
        function: Callable[[TaskT], ResultT],
        tasks: list[TaskT],
        sizes: Sequence[int],
        result_type: Callable[..., ResultT],
    ) -> list[ResultT]:
        """`sizes` are the bytes of the tasks, for the progress."""
        results = []
        with self._progress.stage(name, sum(sizes)) as advance:
            for size, (result, before) in zip(sizes, run_stage(self._engine, function, tasks, result_type), strict=True):
                results.append(result)
                advance(size, already_done=before)
        return results

    @property
    def timings(self) -> dict[str, Any]:
        return self._progress.summary()


@contextlib.contextmanager
def open_runner(stages: Sequence[str], num_workers: int) -> Iterator[Runner]:
    with open_engine(num_workers) as engine:
        yield Runner(engine, Progress(stages))


@contextlib.contextmanager
def open_runner_of(config: PrepareConfig, stages: Sequence[str], num_partitions: int) -> Iterator[Runner]:
    if config.engine == "local":
        with open_runner(stages, min(config.workers or num_cores(), num_partitions)) as runner:
            yield runner
        return
    from data_pipeline.execution.ray_engine import open_ray  # noqa: PLC0415 - an optional dependency

    with open_ray(config.ray_address, config.workers) as engine:
        yield Runner(engine, Progress(stages))
