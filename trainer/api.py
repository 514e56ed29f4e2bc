"""The names that extension files may import. Everything else in this package can change without notice.

Arguments of hooks and their fields: `RunView`, `TrainConfig`, `Progress`, `StepMetrics`, `Evaluation`.
Models: `ModelConfig`, `Decoder`, `Layout`, `attend`. Losses: `IGNORE`, `cross_entropy_sum`, `linear_cross_entropy_sum`.
Training steps: `MicroStep`, `PassInputs`. To stop the training: `GuardError`.
"""

from __future__ import annotations

from common.errors import GuardError
from trainer.config import ModelConfig, TrainConfig
from trainer.data.batch import IGNORE
from trainer.evaluation.tally import Evaluation
from trainer.extensions.hooks import RunView
from trainer.metrics.sinks.base import StepMetrics
from trainer.model.attention import Layout, attend
from trainer.model.decoder import Decoder
from trainer.model.forward import PassInputs
from trainer.model.loss import cross_entropy_sum, linear_cross_entropy_sum
from trainer.runs.state import Progress
from trainer.training.step import MicroStep

__all__ = [
    "IGNORE",
    "Decoder",
    "Evaluation",
    "GuardError",
    "Layout",
    "MicroStep",
    "ModelConfig",
    "PassInputs",
    "Progress",
    "RunView",
    "StepMetrics",
    "TrainConfig",
    "attend",
    "cross_entropy_sum",
    "linear_cross_entropy_sum",
]
