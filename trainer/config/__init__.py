"""The settings of `train`."""

from trainer.config.data import BatchConfig, DataErrorsConfig, LoaderConfig, MixtureConfig
from trainer.config.finetuning import ClassificationConfig, DistillationConfig, LoraConfig, PreferenceConfig
from trainer.config.health import Action, AlertAction, AlertsConfig, GuardConfig, WatchdogConfig
from trainer.config.model import ModelConfig
from trainer.config.optimization import EmaConfig, LossConfig, OptimConfig, ScheduleConfig
from trainer.config.run import BranchConfig, CheckpointConfig, EvalConfig, LimitsConfig, LogConfig, ResumeConfig
from trainer.config.train import PlanConfig, Precision, TrainConfig, settings_without_effect
