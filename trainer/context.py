from __future__ import annotations

from dataclasses import dataclass, replace

from data_pipeline.dataset.manifest import Manifest
from trainer.config import BatchConfig, TrainConfig
from trainer.distributed.group import Group
from trainer.model.attention import Backend


@dataclass(frozen=True)
class RunContext:
    config: TrainConfig
    """The settings at the start of the run. `trainer.training.adjuster` holds later adjustments."""
    manifest: Manifest
    group: Group
    backend: Backend
    """The backend of the attention."""
    custom_step: bool = False
    """Whether an extension or an objective makes the passes of each micro-batch itself."""

    def with_batch(self, batch: BatchConfig) -> RunContext:
        return replace(self, config=self.config.model_copy(update={"batch": batch}))
