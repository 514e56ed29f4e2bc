"""Every setting of a training run, with its meaning, unit and bounds.

The checks here need only the settings themselves. What depends on the data or the machine is checked in `trainer.opening` and
`trainer.plan`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from common.settings.model import Section, Settings

__all__ = [
    "Action",
    "AlertAction",
    "AlertsConfig",
    "BadDataConfig",
    "BatchConfig",
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


Action = Literal["log", "skip", "rollback", "stop"]
"""What is done about a step whose numbers are bad."""

AlertAction = Literal["off", "log", "stop"]
"""What is done about anything else that a run should not do."""


class ModelConfig(Section):
    """Shape of the decoder; the defaults follow from `width` and `heads`."""

    layers: int = Field(6, ge=1, le=512, description="number of decoder layers")
    width: int = Field(384, ge=8, le=65536, description="width of the residual stream")
    heads: int = Field(6, ge=1, le=1024, description="number of query heads")
    kv_heads: int | None = Field(None, ge=1, le=1024, description="number of key and value heads; none: as many as query heads")
    head_dim: int | None = Field(None, ge=2, le=1024, description="width of one head; none: width / heads")
    mlp_width: int | None = Field(None, ge=8, description="hidden width of SwiGLU; none: 8/3 of width, to a multiple of 64")
    context: int = Field(1024, ge=2, le=1 << 20, description="longest row, in tokens")
    rope_theta: float = Field(10_000.0, gt=1, description="base of the rotary embedding")
    norm_eps: float = Field(1e-6, gt=0, lt=1e-2, description="epsilon of RMSNorm")
    tie_embeddings: bool = Field(True, description="output projection shares the embedding's weights")
    vocab_multiple: int = Field(64, ge=1, le=1024, description="pad the vocabulary to a multiple of this, for faster kernels")
    init_std: float = Field(0.02, gt=0, lt=1, description="standard deviation of the initial weights")
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="recompute in backward to save memory; full: each layer, selective: all but its matrix products and attention",
    )

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width = {self.width} does not divide into model.heads = {self.heads}; change one, or set model.head_dim"
            )
        if self.head_size % 2:
            raise ValueError(f"a head of width {self.head_size} cannot be rotated in pairs; make model.head_dim even")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}")
        return self

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def mlp_size(self) -> int:
        """Hidden width of SwiGLU: 8/3 of the width gives three matrices the size of two of 4 x width."""
        return self.mlp_width or -(-self.width * 8 // 3 // 64) * 64

    def padded_vocab(self, vocab_size: int) -> int:
        """The number of rows of the embedding for a tokenizer of `vocab_size` pieces."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


class BatchConfig(Section):
    """How many rows make one optimizer step, and one forward pass."""

    global_rows: int = Field(32, ge=1, le=1 << 20, description="rows in one optimizer step, over all ranks")
    micro: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = Field(
        8, description="rows in one forward and backward pass of one rank; auto: as many as the memory takes"
    )

    @model_validator(mode="after")
    def _check_division(self) -> BatchConfig:
        if self.micro != "auto" and self.global_rows % self.micro:
            near = max(self.micro, round(self.global_rows / self.micro) * self.micro)
            raise ValueError(
                f"batch.global_rows = {self.global_rows} is no multiple of batch.micro = {self.micro}; "
                f"{near} would be, or choose another micro"
            )
        return self

    @property
    def micro_rows(self) -> int:
        """`micro`, once it is a number: `auto` is resolved before anything is built."""
        assert self.micro != "auto"
        return self.micro

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one global batch."""
        return self.global_rows // self.micro_rows


class MixtureConfig(Section):
    """How often each source is drawn, whatever its size."""

    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="share of the rows by name of the source, relative to each other; none: all rows alike"
    )


class LossConfig(Section):
    """What is minimised."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target's probability spread over the vocabulary")
    z_loss: float = Field(0.0, ge=0, le=1, description="weight of the squared logarithm of the softmax's denominator; 0: none")
    temperature: float = Field(1.0, gt=0, le=100, description="logits are divided by it before the softmax")
    normalise: Literal["tokens", "sequences"] = Field(
        "tokens", description="mean over targets, or over documents' means; a document cut by packing counts once for each piece"
    )
    chunk_tokens: int | None = Field(
        None, ge=1, le=1 << 24, description="positions whose logits exist at one time; none: chosen from the vocabulary's size"
    )


class OptimConfig(Section):
    """The optimizer and gradient clipping."""

    kind: Literal["adamw", "muon"] = Field("adamw", description="muon: for the matrices of the layers, with AdamW for all others")
    lr: float = Field(6e-4, gt=0, le=1, description="peak learning rate")
    weight_decay: float = Field(0.1, ge=0, le=1, description="decoupled decay of matrices; vectors have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the gradient average")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the squared-gradient average")
    eps: float = Field(1e-8, gt=0, lt=1, description="AdamW's epsilon")
    clip_norm: float = Field(
        1.0, gt=0, description="largest global gradient norm; a larger one is scaled down to it; with 1e9 none ever is"
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="decay of Muon's momentum")


class ScheduleConfig(Section):
    """Learning rate over the steps."""

    kind: Literal["cosine", "linear", "wsd", "polynomial", "exponential", "step", "constant"] = Field(
        "cosine", description="shape after the warm-up; wsd: constant, then a straight line down in the last `decay_share`"
    )
    warmup_steps: int = Field(100, ge=0, description="steps of linear rise to the peak")
    decay_steps: int | None = Field(None, ge=1, description="step at which the floor is reached; none: the last step of the limits")
    floor: float = Field(0.1, ge=0, le=1, description="lowest learning rate, as a share of the peak")
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps to `decay_steps` in which the rate falls")
    power: float = Field(2.0, gt=0, le=10, description="polynomial: the exponent")
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="step: steps at which the rate is multiplied by `gamma`"
    )
    gamma: float = Field(0.1, gt=0, lt=1, description="step: that factor")

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.kind == "step" and (not self.milestones or list(self.milestones) != sorted(set(self.milestones))):
            raise ValueError(
                f"schedule.kind = step needs rising schedule.milestones and has {list(self.milestones)}; "
                "name the steps, lowest first"
            )
        if self.kind == "step" and self.milestones[0] < self.warmup_steps:
            raise ValueError(
                f"schedule.milestones begin at {self.milestones[0]}, before schedule.warmup_steps = {self.warmup_steps} are over; "
                "warm up for fewer steps, or begin later"
            )
        if self.kind == "exponential" and self.floor == 0:
            raise ValueError("schedule.kind = exponential never reaches schedule.floor = 0; use a floor above it, such as 0.01")
        return self


class EmaConfig(Section):
    """A moving average of the weights, which is evaluated, and generates text, when it is on."""

    decay: float | None = Field(None, gt=0, lt=1, description="share of the average that a step keeps, such as 0.999; none: off")
    warmup_steps: int = Field(100, ge=0, description="steps in which the decay rises, so that the first weights are soon forgotten")


class GuardConfig(Section):
    """What is done when the numbers of a step are bad: log, skip (withhold the update), rollback or stop."""

    non_finite: Literal["skip", "rollback", "stop"] = Field(
        "skip", description="loss or gradient not finite; the update is withheld in any case"
    )
    exploding: Action = Field("log", description="gradient norm above max_grad_norm; clipping holds the update in any case")
    vanishing: Action = Field("log", description="gradient norm below min_grad_norm")
    spike: Action = Field("log", description="loss far above the level of the last losses")
    drop: Action = Field("log", description="loss far below the lowest of the last losses")
    max_grad_norm: float = Field(10.0, gt=0, description="global gradient norm before clipping above which it counts as exploding")
    min_grad_norm: float = Field(1e-7, ge=0, description="global gradient norm below which it counts as vanishing")
    loss_window: int = Field(128, ge=8, le=65536, description="healthy losses that a loss is compared with")
    spike_factor: float = Field(10.0, gt=0, description="standard deviations of the noise that a spike or drop exceeds")
    spike_floor: float = Field(0.25, gt=0, description="share of the level that a spike or drop exceeds as well")
    max_skips: int = Field(20, ge=0, description="updates withheld in a row before training stops")
    max_rollbacks: int = Field(3, ge=0, description="rollbacks in the whole run before training stops")
    window_steps: int = Field(10, ge=1, description="steps whose rows a rollback leaves out, from the bad step on")
    rollback_lr_factor: float = Field(
        1.0, gt=0, le=1, description="the learning rate is multiplied by it at each rollback; 1: kept"
    )

    @model_validator(mode="after")
    def _check_norms(self) -> Self:
        if self.min_grad_norm >= self.max_grad_norm:
            raise ValueError(
                f"guard.min_grad_norm = {self.min_grad_norm} is not below guard.max_grad_norm = {self.max_grad_norm}; "
                "no gradient would be healthy"
            )
        return self


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


class AlertsConfig(Section):
    """What is watched besides loss and gradient, and what is done: off, log, or stop (save, then end with exit code 5)."""

    loader_wait: AlertAction = Field("log", description="steps wait for data")
    loader_wait_share: float = Field(0.2, gt=0, lt=1, description="share of the time above which they do")
    throughput: AlertAction = Field("log", description="tokens per second fall")
    throughput_drop: float = Field(0.3, gt=0, lt=1, description="share by which they fall below their median")
    window_steps: int = Field(50, ge=5, le=10_000, description="steps over which waiting and speed are judged")
    slow_rank: AlertAction = Field("log", description="one rank is slower than the others")
    throttling: AlertAction = Field("log", description="a GPU lowers its clocks because of heat or power supply")
    gpu_errors: AlertAction = Field("log", description="ECC errors that rise, an Xid, or a GPU that does not answer")
    corrected_errors: int = Field(100, ge=1, description="corrected ECC errors that are news; one uncorrected always is")
    host_memory: AlertAction = Field("log", description="the run's memory on the host grows without end")
    host_memory_mb: float = Field(100.0, gt=0, description="growth in MB per 1,000 steps above which it does")
    disk: AlertAction = Field("log", description="the disk of the run is nearly full")
    disk_free_gb: float = Field(5.0, ge=0, description="GB free below which it is")
    plateau: AlertAction = Field("log", description="the validation loss has stopped falling")
    overfitting: AlertAction = Field("log", description="the validation loss rises while the training loss falls")


class WatchdogConfig(Section):
    """For how long a rank may stand still before its group is ended."""

    enabled: Literal["auto", "on", "off"] = Field("auto", description="auto: under torchrun only; off: for a debugger")
    stall_s: float | None = Field(
        None, ge=1, le=86400, description="seconds without a sign of life in a step; none: 30, or 3 x the slowest step"
    )
    slow_s: float = Field(
        600.0, ge=1, le=86400, description="the same while loading, evaluating and saving, and in the first three steps"
    )
    replicas_steps: int = Field(
        100, ge=0, description="steps between comparisons of the ranks' weights, bit for bit; 0: none. Not with parallel = fsdp"
    )


class BadDataConfig(Section):
    """What is done about a shard of the prepared data that cannot be read, on whatever rank."""

    policy: Literal["stop", "quarantine"] = Field(
        "stop", description="quarantine: from then on its rows are padding, on all ranks, and training goes on"
    )
    max_share: float = Field(0.05, ge=0, le=1, description="share of a split's rows in such shards above which training stops")


class ResumeConfig(Section):
    """What may differ from the run that is continued."""

    allow_changes: tuple[str, ...] = Field(
        (), description="names from the refusal that may differ, or quarantine; the bits will too"
    )


class TrainConfig(Settings):
    """All settings of `trainer train`."""

    environment_prefix: ClassVar[str] = "TRAIN_"
    recipe_table: ClassVar[str] = "train"

    recipe: str | None = Field(None, description="name in env/recipes, or a .toml file")
    data: Path = Field(description="directory that `data_pipeline prepare` wrote")
    run: Path = Field(description="directory of this run; a run that is there already is continued")
    seed: int = Field(1337, ge=0, lt=1 << 63, description="decides the initial weights, the order of rows and the samples")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to compute; auto: on GPUs if the machine has any")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of one rank; none: OMP_NUM_THREADS or its share of the cores"
    )
    precision: Literal["fp32", "bf16", "fp16", "float8"] = Field(
        "fp32", description="of the forward and backward pass; weights stay fp32. float8: in matrix products, bf16 elsewhere"
    )
    tf32: bool = Field(False, description="let GPUs round the inputs of fp32 matrix products to 10 bits, which is faster")
    reproducibility: Literal["off", "run", "elastic"] = Field(
        "run",
        description="run: the same bits for the same number of ranks, also after a resume; elastic: for 1, 2, 4 or 8 ranks",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="fsdp: each rank keeps a part of weights and optimizer state, for models that do not fit one GPU"
    )
    attention: Literal["auto", "varlen", "flex", "documents", "sdpa"] = Field(
        "auto", description="kernel of the attention; auto: the fastest that the machine has"
    )
    extension: Path | None = Field(None, description="a Python file with callbacks, a loss or a model of your own")
    compile: Literal["auto", "on", "off"] = Field("auto", description="torch.compile; auto: on CUDA only")
    verify_data: bool = Field(True, description="check a shard's digest when it is first opened")
    prefetch: int = Field(2, ge=1, le=64, description="global batches read ahead")
    model: ModelConfig = Field(ModelConfig(), description="shape of the decoder")
    batch: BatchConfig = Field(BatchConfig(), description="rows of one step")
    mixture: MixtureConfig = Field(MixtureConfig(), description="shares of the sources")
    loss: LossConfig = Field(LossConfig(), description="what is minimised")
    optim: OptimConfig = Field(OptimConfig(), description="optimizer and clipping")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="learning rate over the steps")
    ema: EmaConfig = Field(EmaConfig(), description="moving average of the weights")
    guard: GuardConfig = Field(GuardConfig(), description="what is done when the numbers of a step are bad")
    limits: LimitsConfig = Field(LimitsConfig(), description="when training ends, whichever comes first")
    eval: EvalConfig = Field(EvalConfig(), description="validation and samples")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="saving the state")
    log: LogConfig = Field(LogConfig(), description="what is shown")
    alerts: AlertsConfig = Field(AlertsConfig(), description="what is watched besides loss and gradient")
    watchdog: WatchdogConfig = Field(WatchdogConfig(), description="ranks that stand still")
    bad_data: BadDataConfig = Field(BadDataConfig(), description="shards that cannot be read")
    resume: ResumeConfig = Field(ResumeConfig(), description="continuing a run")

    def compiles(self, device_type: str) -> bool:
        """True where the model is compiled on devices of this type."""
        return self.compile == "on" or (self.compile == "auto" and device_type == "cuda")

    @model_validator(mode="after")
    def _check_limits(self) -> TrainConfig:
        limits = self.limits
        if limits.steps is None and limits.epochs is None and limits.tokens is None:
            raise ValueError(
                "no end is set; give limits.steps, limits.epochs or limits.tokens (limits.minutes may "
                "come on top; alone it would leave "
                "the learning rate without a length)"
            )
        return self

    @model_validator(mode="after")
    def _check_elastic(self) -> Self:
        if self.reproducibility != "elastic":
            return self
        if self.parallel == "fsdp":
            raise ValueError("reproducibility = elastic adds gradients in its own order, which parallel = fsdp does not; use ddp")
        if self.batch.micro == "auto":
            raise ValueError("reproducibility = elastic needs a fixed batch.micro, because its bits depend on it; give a number")
        if self.batch.micro_batches & (self.batch.micro_batches - 1):
            raise ValueError(
                f"reproducibility = elastic adds gradients in a binary tree, and batch.global_rows = {self.batch.global_rows} "
                f"with batch.micro = {self.batch.micro} make {self.batch.micro_batches} micro-batches, which is no power of two; "
                f"batch.global_rows = {self.batch.micro << (self.batch.micro_batches.bit_length() - 1)} would be"
            )
        return self
