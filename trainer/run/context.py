"""What nearly every part of a run has to know."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipeline.dataset.manifest import Manifest
from trainer.config import TrainConfig
from trainer.distributed.group import Group
from trainer.model.attention import Backend

__all__ = ["RunContext"]


@dataclass(frozen=True)
class RunContext:
    """Settings, data, ranks and attention of a run. Nothing in it changes while the run lasts."""

    config: TrainConfig
    """As the run began. `trainer.training.adjuster` knows what has changed since."""
    manifest: Manifest
    group: Group
    backend: Backend
    """Of the attention."""
