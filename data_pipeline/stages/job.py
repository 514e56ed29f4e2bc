from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from data_pipeline.config import PrepareConfig
from data_pipeline.execution.tasks import Runner
from data_pipeline.sources.inputs import Partition

TaskT = TypeVar("TaskT", bound="PartitionTask")


@dataclass(frozen=True)
class PartitionTask:
    """The work of a stage on one partition. Its files have the partition's number, in one folder for each stage."""

    folder: ClassVar[str]
    config: PrepareConfig  # with the settings of the partition's source
    source: str
    number: int
    work: Path

    def place(self, folder: str) -> Path:
        return self.work / folder / f"{self.number:06d}"

    @property
    def output(self) -> Path:
        return self.place(self.folder)


@dataclass(frozen=True)
class Job:
    config: PrepareConfig
    partitions: Sequence[Partition]
    work: Path
    run: Runner

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.config.augment.special_tokens, *self.config.chat.special_tokens)

    @cached_property
    def of_sources(self) -> dict[str, PrepareConfig]:
        """Only sources that have partitions."""
        return {name: self.config.for_source(name) for name in dict.fromkeys(partition.source for partition in self.partitions)}

    def task(self, kind: Callable[..., TaskT], number: int, **more: Any) -> TaskT:
        source = self.partitions[number].source
        return kind(self.of_sources[source], source, number, self.work, **more)

    def tasks(self, kind: Callable[..., TaskT], **more: Any) -> list[TaskT]:
        return [self.task(kind, number, **more) for number in range(len(self.partitions))]
