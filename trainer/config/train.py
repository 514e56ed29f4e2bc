"""Every setting of a training run, with its meaning, unit and bounds.

The checks here need only the settings. Checks that need the data or the machine are in `trainer.training.setup`
and `trainer.run.limits`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Settings
from trainer.config.data import BadDataConfig, BatchConfig, MixtureConfig
from trainer.config.health import AlertsConfig, GuardConfig, WatchdogConfig
from trainer.config.model import ModelConfig
from trainer.config.optimization import EmaConfig, LossConfig, OptimConfig, ScheduleConfig
from trainer.config.run import CheckpointConfig, EvalConfig, LimitsConfig, LogConfig, ResumeConfig

__all__ = ["TrainConfig"]


class TrainConfig(Settings):
    """All settings of `trainer train`."""

    environment_prefix: ClassVar[str] = "TRAIN_"
    recipe_table: ClassVar[str] = "train"

    recipe: str | None = Field(None, description="Recipe: its name in env/recipes, or a .toml file.")
    data: Path = Field(description="Directory that `data_pipeline prepare` wrote.")
    run: Path = Field(description="Directory of this run. If it already holds a run, that run is continued.")
    seed: int = Field(1337, ge=0, lt=1 << 63, description="Seed of the initial weights, the order of rows and the samples.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device to compute on; auto: GPUs if the machine has any.")
    threads: int | None = Field(
        None, ge=1, le=1024, description="Number of CPU threads of one rank; none: OMP_NUM_THREADS or its share of the cores."
    )
    precision: Literal["fp32", "bf16", "fp16", "float8"] = Field(
        "fp32",
        description="Number format of forward and backward; weights stay fp32. float8: matrix products; bf16 for the rest.",
    )
    tf32: bool = Field(
        False, description="Whether GPUs round the inputs of fp32 matrix products to a mantissa of 10 bits, which is faster."
    )
    reproducibility: Literal["off", "run", "elastic"] = Field(
        "run",
        description="Runs with the same bits. off: none; run: those on the same number of ranks, also after a resume; "
        "elastic: those on 1, 2, 4 or 8 ranks.",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="ddp: each rank has all weights; fsdp: weights and optimizer state are split over the ranks, for large models.",
    )
    attention: Literal["auto", "varlen", "flex", "documents", "sdpa"] = Field(
        "auto", description="Kernel of the attention; auto: the fastest that the machine has."
    )
    extension: Path | None = Field(None, description="Python file with your own callbacks, loss, model or training step.")
    compile: Literal["auto", "on", "off"] = Field("auto", description="Whether torch.compile is used; auto: on CUDA only.")
    verify_data: bool = Field(True, description="Whether a shard's digest is checked when it is first opened.")
    prefetch: int = Field(2, ge=1, le=64, description="Number of global batches that are read in advance.")
    model: ModelConfig = Field(ModelConfig(), description="Shape of the decoder.")
    batch: BatchConfig = Field(BatchConfig(), description="Rows of one step.")
    mixture: MixtureConfig = Field(MixtureConfig(), description="Shares of the sources.")
    loss: LossConfig = Field(LossConfig(), description="Loss that is minimised.")
    optim: OptimConfig = Field(OptimConfig(), description="Optimizer and clipping.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over the steps.")
    ema: EmaConfig = Field(EmaConfig(), description="Moving average of the weights.")
    guard: GuardConfig = Field(GuardConfig(), description="Actions when the loss or gradient of a step is bad.")
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of the training, which ends when it reaches the first one.")
    eval: EvalConfig = Field(EvalConfig(), description="Validation and samples.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Times of checkpoints, and which are kept.")
    log: LogConfig = Field(LogConfig(), description="Terminal, TensorBoard, report and tracking services.")
    alerts: AlertsConfig = Field(AlertsConfig(), description="Alerts besides those on loss and gradient.")
    watchdog: WatchdogConfig = Field(WatchdogConfig(), description="Ranks that make no progress.")
    bad_data: BadDataConfig = Field(BadDataConfig(), description="Shards that cannot be read.")
    resume: ResumeConfig = Field(ResumeConfig(), description="Differences that a resume allows.")

    def compiles(self, device_type: str) -> bool:
        """Return whether the model is compiled on devices of this type."""
        return self.compile == "on" or (self.compile == "auto" and device_type == "cuda")

    @model_validator(mode="after")
    def _check_limits(self) -> TrainConfig:
        limits = self.limits
        if limits.steps is None and limits.epochs is None and limits.tokens is None:
            raise ValueError(
                "no limit is set; give limits.steps, limits.epochs or limits.tokens (limits.minutes alone is not enough, because "
                "the schedule of the learning rate needs a number of steps)"
            )
        return self

    @model_validator(mode="after")
    def _check_elastic(self) -> Self:
        if self.reproducibility != "elastic":
            return self
        if self.parallel == "fsdp":
            raise ValueError("reproducibility = elastic adds gradients in a fixed order, which parallel = fsdp cannot do; use ddp")
        if self.batch.micro == "auto":
            raise ValueError("reproducibility = elastic needs a fixed batch.micro, because its bits depend on it; give a number")
        if self.batch.micro_batches & (self.batch.micro_batches - 1):
            raise ValueError(
                f"reproducibility = elastic adds gradients in a binary tree, and batch.global_rows = {self.batch.global_rows} "
                f"with batch.micro = {self.batch.micro} make {self.batch.micro_batches} micro-batches, not a power of two; "
                f"use for example batch.global_rows = {self.batch.micro << (self.batch.micro_batches.bit_length() - 1)}"
            )
        return self
