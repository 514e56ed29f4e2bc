"""The settings of `train`."""

from trainer.config.data import BadDataConfig, BatchConfig, MixtureConfig
from trainer.config.health import Action, AlertAction, AlertsConfig, GuardConfig
from trainer.config.model import ModelConfig
from trainer.config.optimization import EmaConfig, LossConfig, OptimConfig, ScheduleConfig
from trainer.config.run import BranchConfig, CheckpointConfig, EvalConfig, LimitsConfig, LogConfig, ResumeConfig
from trainer.config.train import TrainConfig

__all__ = [
    "Action",
    "AlertAction",
    "AlertsConfig",
    "BadDataConfig",
    "BatchConfig",
    "BranchConfig",
    "CheckpointConfig",
    "EmaConfig",
    "EvalConfig",
    "GuardConfig",
    "LimitsConfig",
    "LogConfig",
    "LossConfig",
    "MixtureConfig",
    "ModelConfig",
    "OptimConfig",
    "ResumeConfig",
    "ScheduleConfig",
    "TrainConfig",
]
