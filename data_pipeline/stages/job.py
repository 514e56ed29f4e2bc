"""One preparation: what its stages share, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import PrepareConfig, TokenizerSettings
from data_pipeline.dedup.duplicates import STAGES as DUPLICATES
from data_pipeline.dedup.duplicates import RunStage
from data_pipeline.sources.inputs import Partition

__all__ = ["Job", "is_trained", "stage_names"]


@dataclass(frozen=True)
class Job:
    """One preparation: what is read, how, by whom, and where the stages leave their results."""

    config: PrepareConfig
    partitions: Sequence[Partition]
    work: Path
    run: RunStage

    def place(self, folder: str, number: int) -> Path:
        """Where a stage leaves what it made of a partition."""
        return self.work / folder / f"{number:06d}"


def is_trained(settings: TokenizerSettings) -> bool:
    """Whether the tokenizer is trained on a sample of the text."""
    return settings.path is None and settings.kind != "byte"


def stage_names(config: PrepareConfig) -> list[str]:
    """The stages that a preparation with these settings goes through, in their order."""
    return [
        "read",
        *DUPLICATES,
        "split",
        *(["sample"] if is_trained(config.tokenizer) else []),
        "train",
        *(["reference"] if config.quality.trusted else []),
        *(["classifier"] if config.quality.good else []),
        "tokenize",
        *(["weigh"] if config.balance.by != "none" else []),
        "select",
        "pack",
    ]
