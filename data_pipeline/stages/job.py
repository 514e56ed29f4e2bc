"""What the stages of one preparation share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import PrepareConfig, TokenizerConfig
from data_pipeline.execution.runner import Runner
from data_pipeline.sources.inputs import Partition

__all__ = ["Job", "is_trained"]


@dataclass(frozen=True)
class Job:
    """One preparation: its settings, its partitions, its work folder and the runner of its stages."""

    config: PrepareConfig
    partitions: Sequence[Partition]
    work: Path
    run: Runner

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.config.augment.special_tokens, *self.config.chat.special_tokens)

    def place(self, folder: str, number: int) -> Path:
        """Return the path of a partition's result in a folder of the work folder, without extension."""
        return self.work / folder / f"{number:06d}"


def is_trained(settings: TokenizerConfig) -> bool:
    return settings.path is None and settings.kind != "byte"
