"""One preparation: what its stages share, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import PrepareConfig, TokenizerSettings
from data_pipeline.execution.runner import Runner
from data_pipeline.sources.inputs import Partition

__all__ = ["Job", "is_trained"]


@dataclass(frozen=True)
class Job:
    """One preparation: what is read, how, by whom, and where the stages leave their results."""

    config: PrepareConfig
    partitions: Sequence[Partition]
    work: Path
    run: Runner

    def place(self, folder: str, number: int) -> Path:
        """Where a stage leaves what it made of a partition."""
        return self.work / folder / f"{number:06d}"


def is_trained(settings: TokenizerSettings) -> bool:
    """Whether the tokenizer is trained on a sample of the text."""
    return settings.path is None and settings.kind != "byte"
