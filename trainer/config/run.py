"""Settings of the limits, evaluation, checkpoints, logs, resume and branch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from common.settings.markers import (
    ASKED_AGAIN,
    FOLDER,
    NAMES_SETTINGS,
    PER_START,
    AlsoCalled,
    Formerly,
    Frequent,
    InReplay,
    NoEffectOnBits,
    NoEffectOnResults,
    OnlyIf,
)
from common.settings.model import Section

_MAX_PROFILED = 100
_STEP_RANGE = re.compile(r"([1-9][0-9]{0,8})\.\.([1-9][0-9]{0,8})")


def step_range(text: str) -> tuple[int, int]:
    """Return the first and last step of a range such as `10..15`. Raises ValueError if it is none, or too long for a profile."""
    found = _STEP_RANGE.fullmatch(text)
    first, last = (int(found[1]), int(found[2])) if found else (1, 0)
    if not first <= last < first + _MAX_PROFILED:
        raise ValueError(
            f"log.profile_steps = {text} is not a range of 1 to {_MAX_PROFILED} steps; give the first and the last step, such as "
            "10..15"
        )
    return first, last


class LimitsConfig(Section):
    """Limits of the training, which ends at the first one. At least one is needed."""

    steps: Annotated[
        NoEffectOnBits[int | None],
        Frequent("2000", 4),
        InReplay(None),
        AlsoCalled("max_steps num_steps train_steps num_train_steps total_steps iters max_iters iterations"),
    ] = Field(None, ge=1, description="Training ends after this many optimizer steps.")
    epochs: Annotated[NoEffectOnBits[float | None], InReplay(None), AlsoCalled("max_epochs num_epochs num_train_epochs")] = Field(
        None, gt=0, description="Training ends after this many passes over the training rows, such as 1.5."
    )
    tokens: Annotated[NoEffectOnBits[int | None], InReplay(None), AlsoCalled("max_tokens num_tokens total_tokens")] = Field(
        None, ge=1, description="Training ends after this many targets, over all ranks."
    )
    minutes: Annotated[
        NoEffectOnBits[float | None], Frequent("30", 5), InReplay(None), AlsoCalled("hours time max_time max_minutes time_limit")
    ] = Field(None, gt=0, description="Training ends after this many minutes over all resumes, with evaluations and saves.")


class EvalConfig(Section):
    """Validation and text samples."""

    every_steps: Annotated[
        NoEffectOnBits[int], Frequent("250", 10), AlsoCalled("eval_interval eval_steps eval_every val_every val_interval")
    ] = Field(250, ge=1, description="Steps between evaluations. The first and the last step are always evaluated.")
    max_rows: Annotated[NoEffectOnBits[int | None], AlsoCalled("eval_iters eval_batches limit_val_batches")] = Field(
        None, ge=1, description="Validation rows to use, spread evenly over all; none: all."
    )
    micro_batch_size: Annotated[NoEffectOnBits[int | None], Formerly("eval.micro")] = Field(
        None, ge=1, le=65536, description="Rows in a forward pass of a rank; none: batch.micro_batch_size."
    )
    prompt: Annotated[NoEffectOnBits[str], OnlyIf("eval.sample_tokens"), OnlyIf("not eval.prompts")] = Field(
        "", description="Text that the samples continue."
    )
    prompts: Annotated[NoEffectOnBits[tuple[str, ...]], OnlyIf("eval.sample_tokens")] = Field(
        (), description="Texts that the samples continue; empty: eval.prompt, if set, and the beginnings of four validation rows."
    )
    score: Annotated[NoEffectOnBits[bool], OnlyIf("eval.sample_tokens")] = Field(
        True, description="Whether samples are scored: perplexity, repetition, diversity, coherence."
    )
    sample_tokens: NoEffectOnBits[int] = Field(64, ge=0, le=4096, description="Tokens of a sample; 0: no samples.")
    sample_temperature: Annotated[NoEffectOnBits[float], OnlyIf("eval.sample_tokens")] = Field(
        0.8, ge=0, le=10, description="Temperature of the samples; 0: always the most likely token."
    )
    plateau_threshold: Annotated[NoEffectOnBits[float], OnlyIf("alerts.plateau != off or alerts.overfitting != off")] = Field(
        0.001, gt=0, lt=1, description="The validation loss is on a plateau if it changes by less than this share of its median."
    )
    plateau_window: NoEffectOnBits[int] = Field(
        10, ge=7, le=1000, description="Last evaluations that decide about trend, plateau and overfitting."
    )
    patience: Annotated[NoEffectOnBits[int | None], InReplay(None), AlsoCalled("early_stopping early_stopping_patience")] = Field(
        None, ge=1, description="Training ends after this many evaluations in a row without improvement; none: off."
    )
    min_delta: Annotated[NoEffectOnBits[float], OnlyIf("eval.patience")] = Field(
        0.0, ge=0, le=10, description="An improvement is more than this many nats below the last one."
    )


class CheckpointConfig(Section):
    """When a checkpoint is saved, and which checkpoints are kept."""

    every_steps: Annotated[
        NoEffectOnResults[int], AlsoCalled("save_every save_steps save_interval checkpoint_every checkpoint_interval")
    ] = Field(500, ge=1, description="Steps between checkpoints. The last step is always saved.")
    every_minutes: NoEffectOnResults[float] = Field(
        30.0, gt=0, description="A checkpoint is saved after this many minutes if every_steps takes longer."
    )
    keep_last: Annotated[NoEffectOnResults[int], AlsoCalled("save_total_limit keep")] = Field(
        2, ge=1, le=1000, description="Last checkpoints to keep, besides the best by validation loss."
    )
    keep_every: NoEffectOnResults[int | None] = Field(
        None, ge=1, description="Checkpoints of multiples of this step are kept too; none: off."
    )


class LogConfig(Section):
    """Output of the training: terminal, files, TensorBoard and tracking services."""

    every_steps: Annotated[NoEffectOnResults[int], AlsoCalled("log_every log_interval logging_steps log_every_n_steps")] = Field(
        10, ge=1, description="Steps between lines on the terminal and points in TensorBoard."
    )
    report: Annotated[NoEffectOnResults[bool], InReplay(False)] = Field(
        True, description="Whether the end of the training writes report.html and training_metrics.png."
    )
    average_steps: NoEffectOnResults[int] = Field(
        100, ge=2, le=10_000, description="Steps in the moving average of the training loss."
    )
    layers_every_steps: NoEffectOnResults[int] = Field(
        100, ge=0, description="Steps between gradient norm, weight norm and update ratio of each layer; 0: none."
    )
    histograms_every_steps: NoEffectOnResults[int] = Field(
        1000, ge=0, description="Steps between histograms of gradients and weights; 0: none."
    )
    hardware_every_s: NoEffectOnResults[float] = Field(
        10.0, ge=0, le=3600, description="Seconds between measurements of GPUs and host; 0: none."
    )
    profile_steps: Annotated[NoEffectOnResults[str | None], InReplay(None)] = Field(
        None,
        description="First and last step of a profile, such as 10..15: traces, and on GPUs a snapshot of the memory, in the "
        "run's folder profile; none: no profile.",
    )
    wandb_project: Annotated[NoEffectOnResults[str | None], InReplay(None), AlsoCalled("wandb wandb_log")] = Field(
        None, description="Weights & Biases project that shows this run too; none: off."
    )
    mlflow_uri: Annotated[NoEffectOnResults[str | None], ASKED_AGAIN, InReplay(None)] = Field(
        None, description="Address or folder of the MLflow store that shows this run too; none: off."
    )
    mlflow_experiment: Annotated[NoEffectOnResults[str], OnlyIf("log.mlflow_uri")] = Field(
        "trainer", min_length=1, description="Experiment in the MLflow store."
    )

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        if self.profile_steps is not None:
            step_range(self.profile_steps)
        return self

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        if self.mlflow_uri is not None and urlsplit(self.mlflow_uri).password is not None:
            raise ValueError(
                "log.mlflow_uri holds a password, and settings are stored in the run; remove it from the URL, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
        return self


class ResumeConfig(Section):
    """Differences from the continued run that are allowed."""

    allow_changes: Annotated[NoEffectOnResults[tuple[str, ...]], PER_START, NAMES_SETTINGS] = Field(
        (),
        description="Settings that may differ: names from the message of a refused resume, or quarantine. They change the results.",
    )


class BranchConfig(Section):
    """Another run whose state a new run begins with. Its schedule may differ from that of the other run."""

    run: Annotated[NoEffectOnBits[Path | None], FOLDER, InReplay(None)] = Field(
        None, description="Directory of the run to branch off; none: a new run begins with new weights."
    )
    step: Annotated[NoEffectOnBits[int | None], FOLDER, InReplay(None)] = Field(
        None, ge=1, description="Step of the checkpoint to begin with; none: the newest."
    )

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.step is not None and self.run is None:
            raise ValueError("branch.step names a checkpoint of another run; name the run with branch.run")
        return self
