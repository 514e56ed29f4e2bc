"""Every setting of a training run. The checks need only the settings; those of data and machine are in `trainer.training.start`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from common.settings.conditions import OnlyIf
from common.settings.markers import (
    ASKED_AGAIN,
    FOLDER,
    MOVEABLE,
    PER_START,
    AlsoCalled,
    FixesShapes,
    Frequent,
    Identity,
    InReplay,
    NoEffectOnResults,
    NotSearched,
    ResolvedInIdentity,
)
from common.settings.model import Place, Settings
from trainer.config.data import BatchConfig, DataErrorsConfig, LoaderConfig, MixtureConfig, fitting_micro
from trainer.config.finetuning import ClassificationConfig, DistillationConfig, PreferenceConfig
from trainer.config.health import AlertsConfig, GuardConfig, WatchdogConfig
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.config.optimization import EmaConfig, LossConfig, OptimConfig, ScheduleConfig
from trainer.config.run import BranchConfig, CheckpointConfig, EvalConfig, LimitsConfig, LogConfig, ResumeConfig

Precision = Literal["fp32", "bf16", "fp16", "float8"]  # number format of a run's matrix products


class TrainConfig(Settings):
    """All settings of `trainer train`."""

    environment_prefix: ClassVar[str] = "TRAIN_"
    recipe_table: ClassVar[str] = "train"
    resolver: ClassVar[str] = "trainer.runs.defaults"
    facts: ClassVar[tuple[str, ...]] = ("device", "extension.loss", "extension.model", "ranks", "watchdog.enabled")
    examples: ClassVar[tuple[str, ...]] = (
        "--data workspace/data --run workspace/runs/first --recipe demo",
        "--data workspace/data --run workspace/runs/big --limits.epochs 3",
        "--run workspace/runs/first",
    )

    recipe: Annotated[
        ResolvedInIdentity[str | None],
        MOVEABLE,
        NotSearched("the recipe is the same for all trials"),
        Frequent("demo", 3),
        InReplay(None),
    ] = Field(
        None,
        description="Recipe: its name in env/recipes, a .toml file, or auto, which chooses the settings for the text and the time.",
    )
    data: Annotated[
        ResolvedInIdentity[Path],
        FOLDER,
        MOVEABLE,
        NotSearched("losses on different data cannot be compared"),
        Frequent("workspace/data", 1),
        AlsoCalled("data_dir data_path dataset train_data"),
    ] = Field(description="Directory that `trainer prepare` wrote.")
    run: Annotated[
        NoEffectOnResults[Path],
        PER_START,
        NotSearched("each trial has its own run"),
        Place(target="folder"),
        Frequent("workspace/runs/first", 2),
        AlsoCalled("out out_dir output output_dir run_dir save_dir resume resume_from_checkpoint"),
    ] = Field(description="Directory of this run. An existing run is continued; --run alone uses the settings that it has saved.")
    init: Annotated[ResolvedInIdentity[Path | None], FOLDER] = Field(
        None,
        description="Directory of another run whose weights a new run begins with; none: new weights. Step, schedule and "
        "optimizer start from the beginning. After its first checkpoint the new run does not need this directory.",
    )
    init_checkpoint: Annotated[ResolvedInIdentity[str], OnlyIf("init"), FOLDER] = Field(
        "latest", pattern=r"^(latest|best|[0-9]{1,16})$", description="Checkpoint of `init`: latest, best, or its step."
    )
    seed: Annotated[Identity[int], AlsoCalled("random_seed")] = Field(
        1337, ge=0, lt=1 << 63, description="Seed of the initial weights, the order of rows and the samples."
    )
    device: ResolvedInIdentity[Literal["auto", "cpu", "cuda"]] = Field(
        "auto", description="Device to compute on; auto: GPUs if the machine has any."
    )
    threads: Annotated[
        ResolvedInIdentity[int | None],
        NotSearched("all trials have the same number of threads"),
        InReplay(identity=True),
        AlsoCalled("num_threads"),
    ] = Field(
        None, ge=1, le=1024, description="Number of CPU threads of one rank; none: OMP_NUM_THREADS or its share of the cores."
    )
    precision: Annotated[Identity[Literal["auto"] | Precision], AlsoCalled("dtype bf16 fp16 amp mixed_precision")] = Field(
        "auto",
        description="Number format of forward and backward; weights stay fp32. auto: bf16 on GPUs (fp16 if they have no bf16), "
        "fp32 on CPUs (bf16 with AMX from model.width = 256 on). float8: matrix products; bf16 for the rest.",
    )
    tf32: Annotated[Identity[bool], OnlyIf("device = cuda")] = Field(
        False, description="Whether GPUs round the inputs of fp32 matrix products to a mantissa of 10 bits, which is faster."
    )
    reproducibility: Annotated[Identity[Literal["off", "run", "elastic"]], AlsoCalled("deterministic")] = Field(
        "run",
        description="Runs with the same bits. off: none; run: those on the same number of ranks, also after a resume; "
        "elastic: those on 1, 2, 4 or 8 ranks.",
    )
    parallel: Annotated[Identity[Literal["ddp", "fsdp"]], AlsoCalled("fsdp ddp")] = Field(
        "ddp",
        description="ddp: each rank has all weights; fsdp: weights and optimizer state are split over the ranks, for large models.",
    )
    attention: ResolvedInIdentity[Literal["auto", "varlen", "flex", "documents", "sdpa"]] = Field(
        "auto", description="Kernel of the attention; auto: the fastest that the machine has."
    )
    objective: Annotated[Identity[Literal["language", "classification", "preference", "distillation"]], FixesShapes()] = Field(
        "language",
        description="What the model learns. language: the next token; classification: the label of each document; preference: to "
        "prefer the better answer of pairs (DPO); distillation: the next token, and the distributions of a teacher.",
    )
    teacher: Annotated[ResolvedInIdentity[Path | None], OnlyIf("objective = distillation"), FOLDER] = Field(
        None, description="Directory of the run that distillation learns from."
    )
    teacher_checkpoint: Annotated[ResolvedInIdentity[str], OnlyIf("objective = distillation"), FOLDER] = Field(
        "latest", pattern=r"^(latest|best|[0-9]{1,16})$", description="Checkpoint of `teacher`: latest, best, or its step."
    )
    encoder: Annotated[ResolvedInIdentity[Path | None], OnlyIf("objective = classification"), FOLDER] = Field(
        None,
        description="Directory with an encoder of Hugging Face (config.json and *.safetensors) that classification trains; "
        "none: the decoder of `model`.",
    )
    extension: Annotated[ResolvedInIdentity[Path | None], ASKED_AGAIN, NotSearched("the code is the same for all trials")] = Field(
        None, description="Python file with your own callbacks, loss, model or training step."
    )
    compile: Annotated[Identity[Literal["auto", "on", "off"]], AlsoCalled("torch_compile")] = Field(
        "auto", description="Whether torch.compile is used; auto: on CUDA only."
    )
    verify_data: NoEffectOnResults[bool] = Field(True, description="Whether a shard's digest is checked when it is first opened.")
    prefetch: Annotated[NoEffectOnResults[int], InReplay(2)] = Field(
        2, ge=1, le=64, description="Number of global batches that are read in advance."
    )
    loader: LoaderConfig = Field(LoaderConfig(), description="Threads and retries of the reading of rows.")
    model: ModelConfig = Field(ModelConfig(), description="Shape of the decoder.")
    lora: LoraConfig = Field(LoraConfig(), description="Low-rank adapters, which are trained in place of the weights.")
    batch: BatchConfig = Field(BatchConfig(), description="Rows of one step.")
    mixture: MixtureConfig = Field(MixtureConfig(), description="Shares of the sources.")
    preference: PreferenceConfig = Field(PreferenceConfig(), description="Loss of preference pairs")
    loss: LossConfig = Field(LossConfig(), description="Loss that is minimised.")
    distillation: DistillationConfig = Field(DistillationConfig(), description="Loss of a model that learns from a teacher.")
    classification: ClassificationConfig = Field(ClassificationConfig(), description="Classification of documents.")
    optim: OptimConfig = Field(OptimConfig(), description="Optimizer and clipping.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over the steps.")
    ema: EmaConfig = Field(EmaConfig(), description="Moving average of the weights.")
    guard: GuardConfig = Field(GuardConfig(), description="Actions when the loss or gradient of a step is bad.")
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of the training, which ends when it reaches the first one.")
    eval: Annotated[EvalConfig, NotSearched("losses of different evaluations cannot be compared")] = Field(
        EvalConfig(), description="Validation and samples."
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Times of checkpoints, and which are kept.")
    log: Annotated[LogConfig, NotSearched("it has no effect on the loss")] = Field(
        LogConfig(), description="Terminal, TensorBoard, report and tracking services."
    )
    alerts: AlertsConfig = Field(AlertsConfig(), description="Alerts besides those on loss and gradient.")
    watchdog: WatchdogConfig = Field(WatchdogConfig(), description="Ranks that make no progress.")
    data_errors: DataErrorsConfig = Field(DataErrorsConfig(), description="Shards that cannot be read.")
    resume: Annotated[ResumeConfig, NotSearched("it holds for one start alone")] = Field(
        ResumeConfig(), description="Differences that a resume allows."
    )
    branch: BranchConfig = Field(BranchConfig(), description="Checkpoint of another run that a new run continues from.")

    @classmethod
    def adapted(cls, values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        """Return a smaller `batch.micro_batch_size` if that of a recipe does not divide `batch.global_batch_size`."""
        if "batch.micro_batch_size" in given or "batch.micro_batch_size" not in values:
            return {}
        micro = fitting_micro(values.get("batch.global_batch_size"), values["batch.micro_batch_size"])
        return {} if micro is None else {"batch.micro_batch_size": micro}

    @property
    def number_format(self) -> Precision:
        """`precision` as a format. `auto` is replaced by a format before the model is built."""
        assert self.precision != "auto"
        return self.precision

    def compiles(self, device_type: str) -> bool:
        return self.compile == "on" or (self.compile == "auto" and device_type == "cuda")

    @model_validator(mode="after")
    def _check_limits(self) -> TrainConfig:
        limits, schedule = self.limits, self.schedule
        if limits.steps is not None or limits.epochs is not None or limits.tokens is not None:
            return self
        if limits.minutes is None:
            raise ValueError("no limit is set; give limits.steps, limits.epochs, limits.tokens or limits.minutes")
        if schedule.needs_length and schedule.decay_steps is None:
            raise ValueError(
                f"{schedule.needs_length} needs a number of steps, and limits.minutes gives none; set schedule.decay_steps or "
                "another limit, or use schedule.kind = wsd, whose cool-down can begin in time for the end"
            )
        return self

    @property
    def without_adapters(self) -> TrainConfig:
        """The same settings for the model without adapters, or with merged ones."""
        return self.model_copy(update={"lora": LoraConfig()})

    @property
    def as_language_model(self) -> TrainConfig:
        """The same settings for the decoder that a training has left, used as a plain language model."""
        return self.without_adapters.model_copy(
            update={
                "objective": "language",
                "init": None,
                "init_checkpoint": "latest",
                "teacher": None,
                "teacher_checkpoint": "latest",
                "preference": PreferenceConfig(),
                "distillation": DistillationConfig(),
            }
        )

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout or (self.lora.rank is not None and self.lora.dropout > 0)

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora.rank is None:
            return self
        if self.optim.optimizer.needs_whole_matrices:
            raise ValueError(
                f"lora.rank trains adapters, which need AdamW: optim.kind = {self.optim.kind} works on whole matrices, and an "
                "adapter is the product of two; set optim.kind = adamw and a rate for it, such as optim.lr = 3e-4"
            )
        if self.precision == "float8":
            raise ValueError("lora.rank does not work with precision = float8, which replaces the same matrices; use bf16")
        return self

    @model_validator(mode="after")
    def _check_encoder(self) -> Self:
        if self.encoder is not None and self.init is not None:
            raise ValueError("init and encoder both name the weights that the run begins with; remove one of them")
        if self.encoder is not None and self.parallel == "fsdp":
            raise ValueError("parallel = fsdp cannot split an encoder, whose micro-batches have different shapes; use ddp")
        return self

    @model_validator(mode="after")
    def _check_elastic(self) -> Self:
        if self.reproducibility != "elastic":
            return self
        if self.parallel == "fsdp":
            raise ValueError("reproducibility = elastic adds gradients in a fixed order, which parallel = fsdp cannot do; use ddp")
        if self.batch.micro_batch_size == "auto":
            raise ValueError(
                "reproducibility = elastic needs a fixed batch.micro_batch_size, because its bits depend on it; give a number"
            )
        if self.batch.micro_batches & (self.batch.micro_batches - 1):
            raise ValueError(
                f"reproducibility = elastic adds gradients in a binary tree, and batch.global_batch_size = "
                f"{self.batch.global_batch_size} with batch.micro_batch_size = {self.batch.micro_batch_size} make "
                f"{self.batch.micro_batches} micro-batches, which is not a power of two; use for example "
                f"batch.global_batch_size = {self.batch.micro_batch_size << (self.batch.micro_batches.bit_length() - 1)}"
            )
        return self


class PlanConfig(TrainConfig):
    """The settings of `trainer plan`, which writes nothing and so needs no run."""

    run: Annotated[NoEffectOnResults[Path], PER_START, Frequent("workspace/runs/first", 2)] = Field(
        Path(".planned-run"), description="Directory of this run. For an existing run, the plan counts the steps that are done."
    )
