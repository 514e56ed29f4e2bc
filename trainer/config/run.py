"""Settings of limits, evaluation, checkpoints, logs and resume."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from common.settings.model import Section

__all__ = ["CheckpointConfig", "EvalConfig", "LimitsConfig", "LogConfig", "ResumeConfig"]


class LimitsConfig(Section):
    """When training ends: the first limit that is reached. At least one of steps, epochs and tokens is needed."""

    steps: int | None = Field(None, ge=1, description="optimizer steps")
    epochs: float | None = Field(None, gt=0, description="passes over the training rows; fractions are allowed")
    tokens: int | None = Field(None, ge=1, description="training targets, counted over all ranks")
    minutes: float | None = Field(None, gt=0, description="minutes of training time, over all resumes")


class EvalConfig(Section):
    """Validation and text samples."""

    every_steps: int = Field(250, ge=1, description="steps between evaluations; the first and last step are always evaluated")
    max_rows: int | None = Field(None, ge=1, description="validation rows to use, spread evenly over all; none: all")
    micro: int | None = Field(None, ge=1, le=65536, description="rows in one forward pass of one rank; none: batch.micro")
    prompt: str = Field("", description="text that the sample at each evaluation continues")
    prompts: tuple[str, ...] = Field(
        (),
        description="texts that the samples continue; none: eval.prompt, if it is set, and the beginnings of four validation rows",
    )
    score: bool = Field(True, description="score the samples: perplexity, repetition, diversity, coherence")
    sample_tokens: int = Field(64, ge=0, le=4096, description="length of that sample; 0: no sample")
    sample_temperature: float = Field(0.8, ge=0, le=10, description="its temperature; 0 always takes the likeliest token")
    plateau_threshold: float = Field(
        0.001, gt=0, lt=1, description="change over the window, as a share of the validation loss, below which it is a plateau"
    )
    plateau_window: int = Field(10, ge=7, le=1000, description="evaluations that trend, plateau and overfitting are judged by")
    patience: int | None = Field(None, ge=1, description="evaluations without improvement after which training ends; none: off")
    min_delta: float = Field(0.0, ge=0, le=10, description="nats that a validation loss must be below the best to improve on it")


class CheckpointConfig(Section):
    """When the whole state is saved, and what is kept."""

    every_steps: int = Field(500, ge=1, description="steps between checkpoints; the last step is always saved")
    every_minutes: float = Field(30.0, gt=0, description="minutes between checkpoints, if the steps take longer")
    keep_last: int = Field(2, ge=1, le=1000, description="newest checkpoints to keep; the best by validation loss is kept too")
    keep_every: int | None = Field(
        None, ge=1, description="keep those of steps that are multiples of this as well; none: no others"
    )


class LogConfig(Section):
    """What is shown while training."""

    every_steps: int = Field(10, ge=1, description="steps between lines on the terminal and points in TensorBoard")
    report: bool = Field(True, description="write report.html and training_metrics.png when the training ends")
    average_steps: int = Field(100, ge=2, le=10_000, description="steps of the moving average of the training loss")
    layers_every_steps: int = Field(
        100, ge=0, description="steps between norms of gradients and weights and update ratios by layer; 0: none"
    )
    histograms_every_steps: int = Field(1000, ge=0, description="steps between histograms of gradients and weights; 0: none")
    hardware_every_s: float = Field(10.0, ge=0, le=3600, description="seconds between readings of GPUs and machine; 0: none")
    wandb_project: str | None = Field(None, description="project in Weights & Biases that shows this run too; none: off")
    mlflow_uri: str | None = Field(None, description="address or folder of the MLflow store that shows this run too; none: off")
    mlflow_experiment: str = Field("trainer", min_length=1, description="name of the experiment there")

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        if self.mlflow_uri is not None and urlsplit(self.mlflow_uri).password is not None:
            raise ValueError(
                "log.mlflow_uri holds a password, and settings are written into the run; leave it out and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
        return self


class ResumeConfig(Section):
    """What may differ from the run that is continued."""

    allow_changes: tuple[str, ...] = Field(
        (), description="names from the refusal that may differ, or quarantine; the bits will too"
    )
