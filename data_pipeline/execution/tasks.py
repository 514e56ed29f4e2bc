"""Tasks, the units of a stage's work, and their results on disk.

A task writes its data, and last a small sealed JSON file with the result and the digest of each file. Then it is done, and runs
again only if a digest does not match. So nothing is synced here: after a power failure the digests show which results are complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from common.files import digest_file, read_input, sealed, unsealed, write_atomic
from common.hardware import num_cores
from data_pipeline.config import PrepareConfig
from data_pipeline.execution.local_engine import Engine, open_engine
from data_pipeline.execution.progress import Progress

logger = logging.getLogger(__name__)
_MAX_RESULT_BYTES = 256 << 20
_MAX_CHECKS = 8  # at a time; computing digests releases the interpreter lock
Counts = dict[str, int]


class Task(Protocol):
    @property
    def output(self) -> Path:
        """The path of its files without their extensions."""


TaskT = TypeVar("TaskT", bound=Task)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Runner:
    engine: Engine
    progress: Progress

    def __call__(
        self,
        name: str,
        function: Callable[[TaskT], ResultT],
        tasks: list[TaskT],
        sizes: Sequence[int],
        result_type: Callable[..., ResultT],
    ) -> list[ResultT]:
        """Return the result of each task. Those that an earlier run has finished run again only if their files are damaged.

        `sizes` are the bytes of the tasks, for the progress.
        """
        results = []
        with self.progress.stage(name, sum(sizes)) as advance:
            stored = _stored_results(tasks, result_type)
            to_do = self.engine.map(function, [task for task, before in zip(tasks, stored, strict=True) if before is None])
            for size, before in zip(sizes, stored, strict=True):
                results.append(next(to_do) if before is None else before)
                advance(size, already_done=before is not None)
        return results


@contextmanager
def open_runner(config: PrepareConfig, stages: Sequence[str], num_partitions: int) -> Iterator[Runner]:
    engine: AbstractContextManager[Engine]
    if config.engine == "local":
        engine = open_engine(max(1, min(config.workers or num_cores(), num_partitions)))
    else:
        from data_pipeline.execution.ray_engine import open_ray  # noqa: PLC0415 - an optional dependency

        engine = open_ray(config.ray_address, config.workers)
    with engine as opened:
        yield Runner(opened, Progress(stages))


def _stored_results(tasks: Sequence[TaskT], result_type: Callable[..., ResultT]) -> list[ResultT | None]:
    results: list[ResultT | None] = [None] * len(tasks)
    problems: list[str] = []
    with ThreadPoolExecutor(min(num_cores(), _MAX_CHECKS)) as pool:
        finished = [number for number, task in enumerate(tasks) if os.path.lexists(_result_path(task.output))]
        checked = [pool.submit(_stored_result, tasks[number].output, result_type) for number in finished]
        for number, future in zip(finished, checked, strict=True):
            try:
                results[number] = future.result()
            except (OSError, ValueError) as error:
                problems.append(str(error))
                _result_path(tasks[number].output).unlink(missing_ok=True)
    if problems:
        more = f", and {len(problems) - 1} more of {len(finished)}" if len(problems) > 1 else ""
        logger.warning("an intermediate result of an earlier run is damaged and is made again: %s%s", problems[0], more)
    return results


def _stored_result(output: Path, result_type: Callable[..., ResultT]) -> ResultT:
    """Raises ValueError or OSError if the result or one of its files is damaged."""
    path = _result_path(output)
    try:
        stored = unsealed(read_input(path, _MAX_RESULT_BYTES, below=path.parent))
        files, result = dict(stored["files"]), result_type(**stored["result"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    check_files(output, files)
    return result


def check_files(output: Path, files: Mapping[str, str]) -> None:
    """Raises ValueError or OSError for the first file that differs."""
    for name, expected in files.items():
        path = Path(os.path.normpath(output.parent / name))
        if digest_file(path, below=output.parent.parent) != expected:
            raise ValueError(f"{path}: its content does not match its digest")


def add_counts(counts: Iterable[Mapping[str, int]]) -> Counts:
    """In the order in which the names first occur."""
    total: Counts = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return total


def add_nested(nested: Iterable[Mapping[str, Counts]]) -> dict[str, Counts]:
    total: dict[str, list[Counts]] = {}
    for counts in nested:
        for name, values in counts.items():
            total.setdefault(name, []).append(values)
    return {name: add_counts(values) for name, values in total.items()}


def commit_result(task: Task, result: ResultT, *files: Mapping[Path, str]) -> ResultT:
    """Write the result, a dataclass or dictionary of plain values, and the digests of its files: this marks the task as done."""
    task.output.parent.mkdir(parents=True, exist_ok=True)
    names = {os.path.relpath(path, task.output.parent): digest for written in files for path, digest in written.items()}
    values = result if isinstance(result, dict) else asdict(result)  # type: ignore[call-overload]
    write_atomic(_result_path(task.output), sealed({"result": values, "files": names}), durable=False)
    return result


def _result_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.json")
