"""A unit of a stage's work, and the tables in which stages hand documents on; each is there under its final name or not at all.

A task names its output. The data is written first and a small JSON file with the result last: where that file is, the task is done
and is not run again, however often the preparation was killed since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.engine import Engine
from data_pipeline.files import canonical_json, sync_file, unfinished_path, write_atomic

__all__ = [
    "Counts",
    "TableWriter",
    "Task",
    "add_counts",
    "commit_result",
    "data_path",
    "read_batches",
    "read_column",
    "read_side_by_side",
    "read_table",
    "run_stage",
]

_BATCH_BYTES = 4 << 20  # text in one record batch of an intermediate file: bounds the memory of every stage

Counts = dict[str, int]


class Task(Protocol):
    """What a stage does once: a task names the place of its result."""

    @property
    def output(self) -> Path:
        """The path of its files, without their extensions."""


TaskT = TypeVar("TaskT", bound=Task)
ResultT = TypeVar("ResultT")


def run_stage(
    engine: Engine, function: Callable[[TaskT], ResultT], tasks: list[TaskT], result_type: Callable[..., ResultT]
) -> Iterator[tuple[ResultT, bool]]:
    """The results of a stage in the order of its tasks; what an earlier run has finished is read, not done again.

    With each result comes whether an earlier run had it.
    """
    done = [_result_path(task).exists() for task in tasks]
    to_do = engine.map(function, [task for task, before in zip(tasks, done, strict=True) if not before])
    for task, before in zip(tasks, done, strict=True):
        yield (result_type(**json.loads(_result_path(task).read_bytes())) if before else next(to_do)), before


class TableWriter:
    """Writes an Arrow file in batches; it has its final name only when it is complete and on the device."""

    def __init__(self, output: Path, schema: pa.Schema) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self._path = data_path(output)
        self._temporary = unfinished_path(self._path)
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def __enter__(self) -> TableWriter:
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        return self

    def add(self, row: tuple[Any, ...], num_bytes: int) -> None:
        """Adds a row that holds about `num_bytes`; rows are gathered into batches of a few MiB."""
        self._rows.append(row)
        self._bytes += num_bytes
        if self._bytes >= _BATCH_BYTES:
            self._flush()

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes a batch as it is."""
        self._writer.write_batch(batch)

    def _flush(self) -> None:
        if self._rows:
            columns = [
                pa.array(column, kind) for column, kind in zip(zip(*self._rows, strict=True), self._schema.types, strict=True)
            ]
            self.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._rows, self._bytes = [], 0

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._flush()
        self._writer.close()
        self._file.close()
        if error is not None:
            self._temporary.unlink(missing_ok=True)
            return
        sync_file(self._temporary)
        self._temporary.rename(self._path)


def read_batches(output: Path) -> Iterable[pa.RecordBatch]:
    """The record batches of an intermediate file, each mapped when it is its turn."""
    reader = pa.ipc.open_file(pa.memory_map(str(data_path(output))))
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def read_table(output: Path) -> pa.Table:
    """A small intermediate file, whole."""
    return pa.ipc.open_file(pa.memory_map(str(data_path(output)))).read_all().combine_chunks()


def read_column(output: Path, name: str) -> NDArray[Any]:
    """One column of numbers of an intermediate file, whole."""
    values: NDArray[Any] = read_table(output).column(name).to_numpy()
    return values


def read_side_by_side(output: Path, other: Path) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """The batches of an intermediate file, each with its rows of another, small one that has a row for each row of the first."""
    rows = read_table(other)
    position = 0
    for batch in read_batches(output):
        yield batch, rows.slice(position, batch.num_rows)
        position += batch.num_rows


def add_counts(counts: Iterable[Mapping[str, int]]) -> Counts:
    """The sum of counts by name, in the order in which the names come up first."""
    total: Counts = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return total


def commit_result(task: Task, result: ResultT) -> ResultT:
    """Writes the result of a task, which says that the task is done, and returns it."""
    task.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(_result_path(task), canonical_json(asdict(result)))  # type: ignore[call-overload]
    return result


def data_path(output: Path) -> Path:
    """The table of a task's output."""
    return output.with_name(f"{output.name}.arrow")


def _result_path(task: Task) -> Path:
    return task.output.with_name(f"{task.output.name}.json")
